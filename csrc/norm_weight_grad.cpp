// The gradient of a weight alone, for weights that do not fit in L2: blocks dealt out to threads, so that each
// stays where it is while the pixels go by, and none is kept once a thread.
#include <algorithm>

#include "norm_threads.h"

namespace shoal {
namespace {

constexpr std::int64_t kBlockFloats = 40 << 10;  // a third of the smallest L2 in use
constexpr std::int64_t kMaxOut = 128, kMaxIn = 256, kMaxOutOfTaps = 64;
constexpr int kPixels = 64;  // of a patch: its gradients and one tile of its inputs stay in L1

std::int64_t parts(std::int64_t value, std::int64_t most) { return (value + most - 1) / most; }

// How a call is cut: into blocks of channels, and patches of pixels.
struct Cut {
    std::int64_t outs, ins, out_blocks, in_blocks;
    GradBlock block;  // without channels and memory
    std::int64_t sums_floats, input_floats, grad_floats;
    int threads;

    Cut(const ShoalNormWeightGrad& call, const Level& level) : block{} {
        const std::int64_t taps = std::int64_t{call.kernel} * call.kernel;
        const std::int64_t most_out = taps > 1 ? kMaxOutOfTaps : kMaxOut;
        out_blocks = parts(call.out_channels, most_out);
        if (call.out_channels >= 8 * call.threads) out_blocks = up(out_blocks, call.threads);  // as many for everyone
        outs = parts(call.out_channels, out_blocks);
        out_blocks = parts(call.out_channels, outs);
        const std::int64_t most_in = std::max(kBlockFloats / (taps * outs) / level.columns * level.columns, level.columns * std::int64_t{1});
        in_blocks = parts(call.in_channels, std::min(most_in, kMaxIn));
        ins = up(parts(call.in_channels, in_blocks), level.columns);
        in_blocks = parts(call.in_channels, ins);
        threads = int(std::min<std::int64_t>(call.threads, out_blocks * in_blocks));
        block.call = &call;
        const std::int64_t column_parts = parts(call.out_width, kPixels);
        block.columns = int(parts(call.out_width, column_parts));
        const std::int64_t row_parts = parts(call.out_height, std::max<std::int64_t>(1, kPixels / block.columns));
        block.rows = int(parts(call.out_height, row_parts));
        block.input_stride = int(up(ins, 16) + 16);  // off the powers of two
        block.grad_stride = int(up(outs, 16) + 16);
        sums_floats = taps * outs * up(ins, level.columns);
        input_floats = std::int64_t{block.panel_rows(block.rows)} * block.panel_columns(block.columns) * block.input_stride;
        grad_floats = std::int64_t{block.rows} * block.columns * block.grad_stride + 16;
    }

    std::int64_t bytes_a_thread() const {
        return up((up(sums_floats, 16) + up(input_floats, 16) + up(grad_floats, 16)) * std::int64_t{sizeof(float)}, 64);
    }
};

// A 1 x 1 of stride 1 knows no rows: all pixels are one.
ShoalNormWeightGrad in_one_row(ShoalNormWeightGrad call) {
    if (call.kernel != 1 || call.stride != 1) return call;
    call.out_width = call.width = call.images * call.height * call.width;
    call.images = call.height = call.out_height = 1;
    return call;
}

void weight_grad(const ShoalNormWeightGrad& call, const Level& level) {
    const Cut cut(call, level);
    on_threads(cut.threads, [&](int thread) {
        GradBlock own = cut.block;
        own.sums = reinterpret_cast<float*>(static_cast<char*>(call.workspace) + thread * cut.bytes_a_thread());
        own.inputs = own.sums + up(cut.sums_floats, 16);
        own.grads = own.inputs + up(cut.input_floats, 16);
        on_share(cut.out_blocks * cut.in_blocks, thread, cut.threads, [&](std::int64_t job, std::int64_t) {
            own.out_first = int(job / cut.in_blocks * cut.outs);
            own.in_first = int(job % cut.in_blocks * cut.ins);
            own.outs = int(std::min(cut.outs, call.out_channels - own.out_first));
            own.ins = int(std::min(cut.ins, call.in_channels - own.in_first));
            level.weight_grad(own);
        });
    });
}

}  // namespace
}  // namespace shoal

SHOAL_API std::int64_t shoal_norm_weight_grad_workspace_bytes(const ShoalNormWeightGrad* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return 0;
    const ShoalNormWeightGrad flat = shoal::in_one_row(*call);
    const shoal::Cut cut(flat, *level);
    return cut.threads * cut.bytes_a_thread();
}

SHOAL_API std::int32_t shoal_norm_weight_grad(const ShoalNormWeightGrad* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    shoal::weight_grad(shoal::in_one_row(*call), *level);
    return SHOAL_DONE;
}
