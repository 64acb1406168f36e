"""How each kind of layer of `bench.fuzz_networks` is written as source text, for the shape that it meets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

_MAX_ELEMENTS = 1 << 15  # of any tensor: networks are tiny, since compiling takes the time
_MAX_TOKENS = 144
_MIN_FOR_WINDOWS = 3
_PADDING_MODES = ("zeros", "circular", "reflect", "replicate")


@dataclass
class Writer:
    """Source text as far as it is written, and the shape of `x` there."""

    batch: int
    channels: int
    sizes: tuple[int, ...]
    made: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    names: int = 0

    @property
    def dims(self) -> int:
        return len(self.sizes)

    @property
    def elements(self) -> int:
        return self.batch * self.channels * prod(self.sizes)

    def name(self) -> str:
        """A new variable."""
        self.names += 1
        return f"a{self.names}"

    def module(self, text: str) -> str:
        """Make a module (parameter, buffer) in `__init__`; what it is called in `forward`."""
        self.names += 1
        self.made.append(f"self.l{self.names} = {text}")
        return f"self.l{self.names}"

    def buffer(self, text: str) -> str:
        """Register a buffer; what it is called in `forward`."""
        self.names += 1
        self.made.append(f'self.register_buffer("l{self.names}", {text})')
        return f"self.l{self.names}"

    def put_in(self, state: str, first: int) -> None:
        """Freeze what was made from the `first` on, or put it in eval mode."""
        for text in self.made[first:]:
            layer, made, of = text.partition(" = ")
            if made and state == "frozen":
                self.made.append(f"{layer}.requires_grad_(False)")
            elif of.startswith("nn.") and not of.startswith("nn.Parameter"):
                self.made.append(f"{layer}.eval()")

    def line(self, text: str) -> None:
        self.lines.append(text)

    def ones(self) -> str:  # one for each dimension behind the channels: `1, 1`
        return ", ".join("1" for _ in self.sizes)

    def spread(self) -> str:  # the sizes behind the channels: `8, 8`
        return ", ".join(map(str, self.sizes))


def _conv(w: Writer, variant: str, amount: int) -> None:
    out = (4, 6, 8, 12)[amount % 4]
    kernel, rest, smallest = 3, f"padding=1, bias={amount % 3 > 0}", min(w.sizes)
    kind, sizes = f"nn.Conv{w.dims}d", w.sizes
    if variant == "pointwise":
        kernel, rest = 1, ""
    elif variant == "strided":
        rest, sizes = f"{rest}, stride=2", tuple((size + 1) // 2 for size in sizes)
    elif variant == "dilated":
        rest = "padding=2, dilation=2"
    elif variant == "grouped" and w.channels % 2 == 0:
        rest = f"{rest}, groups=2"
    elif variant == "depthwise":
        out, rest = w.channels, f"{rest}, groups={w.channels}"
    elif (mode := variant.split("_")[0]) in _PADDING_MODES and smallest > 1:
        rest = f"{rest}, padding_mode='{mode}'"
        if variant.endswith("strided"):
            rest, sizes = f"{rest}, stride=2", tuple((size + 1) // 2 for size in sizes)
        elif variant.endswith("wide") and smallest > 2:
            kernel, rest = 5, rest.replace("padding=1", "padding=2")
        elif variant.endswith("uneven"):  # one pixel on one side, none on the other
            kernel, rest = 2, rest.replace("padding=1", "padding='same'")
    elif variant == "unpadded" and smallest >= _MIN_FOR_WINDOWS:
        rest, sizes = "bias=False", tuple(size - 2 for size in sizes)
    elif variant.startswith("transposed"):
        kind = f"nn.ConvTranspose{w.dims}d"
        if variant == "transposed_strided" and w.elements << w.dims <= _MAX_ELEMENTS:
            kernel, rest, sizes = 2, "stride=2", tuple(2 * size for size in sizes)
    layer = w.module(f"{kind}({w.channels}, {out}, {kernel}{', ' if rest else ''}{rest})")
    if variant.endswith("frozen"):
        w.made.append(f"{layer}.requires_grad_(False)")
    w.line(f"x = {layer}(x)")
    w.channels, w.sizes = out, sizes


_BATCH_NORMS = {
    "batch_untracked": ", track_running_stats=False",
    "batch_plain": ", affine=False",
    "batch_momentum": ", momentum=0.5, eps=1e-3",
    "batch_cumulative": ", momentum=None",
    "batch_eval_plain": ", affine=False",
}


def _norm(w: Writer, variant: str, amount: int) -> None:
    c, pixels = w.channels, prod(w.sizes)
    if (variant.startswith("batch") and w.batch * pixels < 2) or (variant.startswith("instance") and pixels < 2):
        return
    groups = next(g for g in ((4, 2, 1), (2, 1), (1,))[amount % 3] if c % g == 0)
    match variant:
        case "batch_functional":
            mean, var = w.buffer(f"torch.zeros({c})"), w.buffer(f"torch.ones({c})")
            weight = w.module(f"nn.Parameter(torch.ones({c}))")
            w.line(f"x = F.batch_norm(x, {mean}, {var}, {weight}, None, False)")
            return
        case "instance" | "instance_affine" | "instance_tracked":
            how = {"instance_affine": ", affine=True", "instance_tracked": ", track_running_stats=True"}
            layer = w.module(f"nn.InstanceNorm{w.dims}d({c}{how.get(variant, '')})")
        case _ if variant.startswith("batch"):
            layer = w.module(f"nn.BatchNorm{w.dims}d({c}{_BATCH_NORMS.get(variant, '')})")
            if "eval" in variant:  # statistics as of a network that was trained
                w.made.append(f"nn.init.normal_({layer}.running_mean, std=0.3)")
                w.made.append(f"nn.init.uniform_({layer}.eval().running_var, 0.5, 2)")
            if "frozen" in variant:
                w.made.append(f"{layer}.requires_grad_(False)")
        case "group" | "group_plain":
            layer = w.module(f"nn.GroupNorm({groups}, {c}{', affine=False' if variant == 'group_plain' else ''})")
        case "layer":
            layer = w.module(f"nn.LayerNorm([{c}, {w.spread()}])")
        case _:
            kind = {"layer_last": "LayerNorm", "rms_last": "RMSNorm"}[variant]
            layer = w.module(f"nn.{kind}({c})")
            w.line(f"x = {layer}(x.movedim(1, -1)).movedim(-1, 1)")
            return
    w.line(f"x = {layer}(x)")


def _act(w: Writer, variant: str, amount: int) -> None:
    if variant == "prelu":
        layer = w.module(f"nn.PReLU({w.channels if amount % 2 else 1})")
        w.line(f"x = {layer}(x)")
    elif variant.endswith("_"):
        w.line(f"x = F.{variant[:-1]}(x, inplace=True)")
    else:
        w.line(f"x = F.{variant}(x)")


def _pool(w: Writer, variant: str, amount: int) -> None:
    if variant.startswith("adaptive"):
        kind = {"adaptive_avg": "avg", "adaptive_max": "max"}[variant]
        size = min(1 + amount % 4, *w.sizes)
        w.line(f"x = F.adaptive_{kind}_pool{w.dims}d(x, {size})")
        w.sizes = (size,) * w.dims
        return
    kind, ceil = variant[:3], amount % 2 == 1
    if min(w.sizes) < _MIN_FOR_WINDOWS:
        return
    if variant.endswith("overlapping"):
        w.line(f"x = F.{kind}_pool{w.dims}d(x, 3, stride=2, padding=1)")
        w.sizes = tuple((size - 1) // 2 + 1 for size in w.sizes)
    elif variant.endswith("same"):
        w.line(f"x = F.{kind}_pool{w.dims}d(x, 3, stride=1, padding=1)")
    else:
        w.line(f"x = F.{kind}_pool{w.dims}d(x, 2, ceil_mode={ceil})")
        w.sizes = tuple((size + ceil) // 2 for size in w.sizes)


def _pixels(w: Writer, variant: str, amount: int) -> None:
    """A linear layer over pixels: channels go last, and come back as a view with strides of its own."""
    n, c = w.batch, w.channels
    out = c if variant == "added" else (c, 4, 8)[amount % 3]
    layer = w.module(f"nn.Linear({c}, {out})")
    shape = f"{n}, {out}, {w.spread()}"
    match variant:
        case "flattened":
            w.line(f"x = {layer}(x.flatten(2).transpose(1, 2)).transpose(1, 2).view({shape})")
        case "added":
            w.line(f"x = x + {layer}(x.flatten(2).transpose(1, 2)).transpose(1, 2).view({shape})")
        case "contiguous":
            w.line(f"x = {layer}(x.flatten(2).transpose(1, 2)).transpose(1, 2).contiguous().view({shape})")
        case "moved":
            w.line(f"x = {layer}(x.movedim(1, -1)).movedim(-1, 1)")
        case "conv1d":
            layer = w.module(f"nn.Conv1d({c}, {out}, 1)")
            w.line(f"x = {layer}(x.flatten(2)).view({shape})")
    w.channels = out


def _attention(w: Writer, variant: str, amount: int) -> None:
    n, c, tokens = w.batch, w.channels, prod(w.sizes)
    if tokens > _MAX_TOKENS:
        return
    heads = 2 if c % 2 == 0 else 1
    dropout = 0.2 if amount % 4 == 0 else 0.0
    a, q, k, v = (w.name() for _ in range(4))
    w.line(f"{a} = x.flatten(2).transpose(1, 2)")
    if amount % 3 == 0:
        norm = w.module(f"nn.LayerNorm({c})")
        w.line(f"{a} = {norm}({a})")
    layer = w.module(f"nn.Linear({c}, {3 * c})")
    split = f"({n}, {tokens}, {heads}, {c // heads}).transpose(1, 2)"
    w.line(f"{q}, {k}, {v} = (t.reshape{split} for t in {layer}({a}).chunk(3, -1))")
    if variant.startswith("fused"):
        causal = ", is_causal=True" if variant == "fused_causal" else ""
        w.line(f"{a} = F.scaled_dot_product_attention({q}, {k}, {v}, dropout_p={dropout}{causal})")
    else:
        w.line(f"{a} = torch.softmax({q} @ {k}.transpose(-2, -1) * {(c // heads) ** -0.5:.4f}, -1)")
        if variant == "by_hand_masked":
            w.line(f"{a} = {a}.masked_fill({a} < 0.001, 0)")
        w.line(f"{a} = F.dropout({a}, {dropout}) @ {v}")
    out = w.module(f"nn.Linear({c}, {c})")
    w.line(f"{a} = {out}({a}.transpose(1, 2).reshape({n}, {tokens}, {c})).transpose(1, 2)")
    skip = "x + " if amount % 2 else ""
    w.line(f"x = {skip}{a}.reshape({n}, {c}, {w.spread()})")


def _view(w: Writer, variant: str, amount: int) -> None:
    n, c, sizes = w.batch, w.channels, w.sizes
    even = all(size % 2 == 0 for size in sizes)
    match variant:
        case "pixel_unshuffle" if w.dims == 2 and even and 4 * c <= 32:
            w.line("x = F.pixel_unshuffle(x, 2)")
            w.channels, w.sizes = 4 * c, tuple(size // 2 for size in sizes)
        case "pixel_shuffle" if w.dims == 2 and c % 4 == 0:
            w.line("x = F.pixel_shuffle(x, 2)")
            w.channels, w.sizes = c // 4, tuple(2 * size for size in sizes)
        case "chunk_swap" if c % 2 == 0:
            a, b = w.name(), w.name()
            w.line(f"{a}, {b} = x.chunk(2, 1)")
            w.line(f"x = torch.cat(({b}, {a}), 1)")
        case "split_gate" if c % 2 == 0 and c > 2:
            a, b = w.name(), w.name()
            w.line(f"{a}, {b} = x.split({c // 2}, 1)")
            w.line(f"x = {a} * torch.sigmoid({b})")
            w.channels = c // 2
        case "channel_shuffle" if c % 2 == 0:
            w.line(f"x = x.view({n}, 2, {c // 2}, {w.spread()}).transpose(1, 2).reshape({n}, {c}, {w.spread()})")
        case "transpose" if w.dims > 1:
            w.line("x = x.transpose(-2, -1)")
            w.sizes = (*sizes[:-2], sizes[-1], sizes[-2])
        case "slice" if min(sizes) >= _MIN_FOR_WINDOWS:
            w.line("x = x[..., ::2]")
            w.sizes = (*sizes[:-1], (sizes[-1] + 1) // 2)
        case "narrow" if c > 2:
            w.line(f"x = x[:, 1:]{'.contiguous()' if amount % 2 else ''}")
            w.channels = c - 1
        case "pad" if w.elements * 2 <= _MAX_ELEMENTS:
            mode = ("constant", "reflect", "replicate", "circular")[amount % 4 if sizes[-1] > 2 else 0]
            most = 2 if mode == "constant" else 2 * w.dims  # the other modes pad all dimensions behind the channels
            w.line(f"x = F.pad(x, ({', '.join(['1', '2', *['0'] * (most - 2)])}), mode='{mode}')")
            w.sizes = (*sizes[:-1], sizes[-1] + 3)
        case "upsample" if w.elements << w.dims <= _MAX_ELEMENTS:
            w.line(f"x = F.interpolate(x, scale_factor=2, mode={'nearest' if amount % 2 else 'area'!r})")
            w.sizes = tuple(2 * size for size in sizes)
        case "flip":
            w.line(f"x = x.flip({(1, 2, -1)[amount % 3]})")
        case "roll":
            w.line("x = x.roll(1, -1)")
        case "stack":
            w.line("x = torch.stack((x, x.tanh()), 2).sum(2)")
        case "expand":
            w.line(f"x = x + x[:, :1].expand({n}, {c}, {w.spread()})")
        case "contiguous":
            w.line("x = x.contiguous()")
        case "flatten_view":
            w.line(f"x = x.flatten(1).view({n}, {c}, {w.spread()})")
        case "unbind":
            w.line("x = torch.stack(x.unbind(1)[::-1], 1)")


def _inplace(w: Writer, variant: str, amount: int) -> None:
    half = max(1, w.channels // 2)
    a = w.name()
    match variant:
        case "add_":
            w.line("x = x * 1.5")
            w.line("x.add_(1)")
        case "half_mul_":
            w.line("x = x.clone()")
            w.line(f"x[:, :{half}].mul_(2)")
        case "half_relu_":
            w.line("x = x * 1.0")
            w.line(f"F.relu(x[:, :{half}], inplace=True)")
        case "add_flipped":
            w.line("x = x + 1")
            w.line(f"x += x.detach().flip({(1, -1)[amount % 2]})")
        case "add_of_transposed":
            w.line(f"{a} = x.flatten(2).transpose(1, 2).tanh()")
            w.line(f"x = x.sin().add_({a}.transpose(1, 2).reshape({w.batch}, {w.channels}, {w.spread()}))")
        case "copy_":
            w.line(f"{a} = torch.zeros_like(x)")
            w.line(f"{a}.copy_(x)")
            w.line(f"x = {a}")
        case "assigned":
            w.line(f"{a} = x.new_zeros({w.batch}, {w.channels + 1}, {w.spread()})")
            w.line(f"{a}[:, 1:] = x")
            w.line(f"x = {a}")
            w.channels += 1
        case "clamp_":
            w.line("x = (x - 0.1).clamp_(-1, 1)")
        case "directly":
            w.line("x.mul_(0.5)")


def _dropout(w: Writer, variant: str, amount: int) -> None:
    p = (0.1, 0.3, 0.5)[amount % 3]
    match variant:
        case "plain" | "in_place":
            w.line(f"x = F.dropout(x, {p}, inplace={variant == 'in_place'})")
        case "channel":
            layer = w.module(f"nn.Dropout{w.dims}d({p})")
            w.line(f"x = {layer}(x)")
        case "alpha":
            w.line(f"x = F.alpha_dropout(x, {p}, training=True)")
        case "noise":
            w.line("x = x + 0.1 * torch.randn_like(x)")
        case "uniform":
            w.line("x = x * (torch.rand_like(x) < 0.8)")
        case "eval":
            layer = w.module(f"nn.Dropout({p})")
            w.made.append(f"{layer}.eval()")
            w.line(f"x = {layer}(x)")
        case "unused" if amount < 4:  # torch.compile drops it: a known difference, and so a rare one
            w.line("torch.rand(3)")


def _complex(w: Writer, variant: str, amount: int) -> None:
    """Real in, real out: complex parameters are pairs of real ones, which every dtype of a network knows."""
    c, a, z = w.channels, w.name(), w.name()
    w.line(f"{a} = x.float() if x.dtype == torch.bfloat16 else x")  # there is no complex bfloat16
    w.line(f"{z} = torch.complex({a}, {a}.sin())")
    match variant:
        case "spectral":
            scale = w.module(f"nn.Parameter(torch.randn({c}, {w.ones()}, 2) * 0.3 + 1)")
            w.line(f"{z} = torch.fft.rfft({a}, dim=-1) * torch.view_as_complex({scale})")
            w.line(f"x = torch.fft.irfft({z}, n={w.sizes[-1]}, dim=-1).to(x.dtype)")
        case "conjugate":
            w.line(f"x = ({z} * {z}.conj().exp()).real.to(x.dtype) * 0.5")
        case "adjoint":
            w.line(f"{z} = {z}.flatten(2)")
            w.line(f"{z} = ({z} @ {z}.mH / {z}.shape[-1]) @ {z}")
            w.line(f"x = torch.view_as_real({z}).mean(-1).view(x.shape).to(x.dtype)")
        case "mixed":
            mix = w.module(f"nn.Parameter(torch.randn({c}, {c}, 2) * {c**-0.5:.4f})")
            w.line(f'{z} = torch.einsum("nc...,cd->nd...", {z}, torch.view_as_complex({mix}))')
            w.line(f"x = ({z}.real if {amount % 2} else {z}.imag).to(x.dtype)")
        case "magnitude":
            w.line(f"x = torch.view_as_complex(torch.stack(({a} + 0.1, {a}.cos()), -1)).abs().to(x.dtype)")


def _math(w: Writer, variant: str, amount: int) -> None:
    c, a = w.channels, w.name()
    match variant:
        case "softmax":
            w.line("x = torch.softmax(x, 1)")
        case "centre":
            w.line("x = x - x.mean((0, 2), keepdim=True)")
        case "squeeze_excite":
            layer = w.module(f"nn.Linear({c}, {c})")
            w.line(f"x = x * torch.sigmoid({layer}(x.flatten(2).mean(2))).view({w.batch}, {c}, {w.ones()})")
        case "scale":
            scale = w.module(f"nn.Parameter(torch.linspace(0.5, 1.5, {c}).view({c}, {w.ones()}))")
            w.line(f"x = x * {scale}")
        case "running_mean":
            kept = w.buffer("torch.zeros(())")
            w.line(f"{kept}.mul_(0.9).add_(x.detach().mean(), alpha=0.1)")
            w.line(f"x = x - {kept}")
        case "counter":
            kept = w.buffer("torch.zeros((), dtype=torch.long)")
            w.line(f"{kept}.add_(1)")
        case "cumsum":
            w.line("x = x.cumsum(-1) * 0.1")
        case "einsum":
            mix = w.module(f"nn.Parameter(torch.eye({c}) + 0.1)")
            w.line(f'x = torch.einsum("nc...,cd->nd...", x, {mix})')
        case "where":
            w.line("x = torch.where(x > 0.5, x, 0.1 * x)")
        case "detached":
            w.line("x = x * x.detach().abs().amax(1, keepdim=True).clamp(min=0.1)")
        case "double":
            w.line("x = (x.double() * 0.5).to(x.dtype)")
        case "standardise":
            w.line(f"{a} = x.flatten(1)")
            w.line(f"x = (({a} - {a}.mean(1, keepdim=True)) / ({a}.std(1, keepdim=True) + 0.1)).view(x.shape)")
        case "normalize":
            w.line("x = F.normalize(x, dim=1)")
        case "pairwise_max":
            w.line("x = torch.maximum(x, x.flip(1) * 0.5)")
        case "used_twice":
            w.line("x = x.sin() * x.cos()")
        case "logsumexp":
            w.line("x = x - x.logsumexp(1, keepdim=True)")


VARIANTS: dict[str, tuple[str, ...]] = {
    kind: tuple(variants.split())
    for kind, variants in {
        "conv": "plain plain pointwise strided dilated grouped depthwise unpadded transposed transposed_strided frozen "
        "zeros_wide zeros_uneven circular circular_strided circular_wide circular_uneven reflect reflect_strided "
        "reflect_wide reflect_uneven replicate replicate_strided replicate_wide replicate_uneven",
        "norm": "batch batch batch_untracked batch_plain batch_momentum batch_cumulative batch_frozen batch_eval "
        "batch_eval_frozen batch_eval_plain batch_functional instance instance_affine "
        "instance_tracked group group_plain layer layer_last rms_last",
        "act": "relu relu_ leaky_relu leaky_relu_ relu6 relu6_ gelu silu silu_ hardswish hardswish_ elu elu_ tanh "
        "sigmoid mish softplus hardtanh_ celu_ prelu",
        "pool": "max max_overlapping max_same avg avg_overlapping avg_same adaptive_avg adaptive_max",
        "pixels": "flattened added contiguous moved conv1d",
        "attention": "fused fused_causal by_hand by_hand_masked",
        "view": "pixel_unshuffle pixel_shuffle chunk_swap split_gate channel_shuffle transpose slice pad narrow "
        "upsample flip roll stack expand contiguous flatten_view unbind",
        "inplace": "add_ half_mul_ half_relu_ add_flipped add_of_transposed copy_ assigned clamp_ directly",
        "dropout": "plain in_place channel alpha noise uniform eval unused",
        "complex": "spectral conjugate adjoint mixed magnitude",
        "math": "softmax centre squeeze_excite scale running_mean counter cumsum einsum where detached double "
        "standardise normalize pairwise_max used_twice logsumexp",
        "branch": "residual in_place concat gate alpha aside_in_place frozen eval",
        "repeat": "twice",
    }.items()
}


WRITERS: dict[str, Callable[[Writer, str, int], None]] = {
    write.__name__[1:]: write
    for write in (_conv, _norm, _act, _pool, _pixels, _attention, _view, _inplace, _dropout, _complex, _math)
}
