// shoal_max_pool and its backward against plain loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "fuzz.h"
#include "report.h"
#include "shoal_native.h"
#include "stored.h"

namespace fuzz {
namespace {

using Index = std::int64_t;

Index elements(const ShoalMaxPool& call, const Index* size) {
    return call.planes * size[0] * size[1] * size[2] * call.pixel;
}

// The elements that window `number` reads, in order, with the byte of each.
struct Place {
    Index at;
    int byte;
};

std::vector<Place> places(const ShoalMaxPool& call, Index number) {
    const Index* out = call.out_size;
    const Index channel = number % call.pixel, window = number / call.pixel;
    const Index at[3] = {window / (out[1] * out[2]) % out[0], window / out[2] % out[1], window % out[2]};
    const Index plane = window / (out[0] * out[1] * out[2]);
    std::vector<Place> found;
    for (Index k = 0; k < call.kernel[0]; ++k)
        for (Index i = 0; i < call.kernel[1]; ++i)
            for (Index j = 0; j < call.kernel[2]; ++j) {
                const Index step[3] = {k, i, j};
                Index pixel = plane, byte = 0;
                bool inside = true;
                for (int axis = 0; axis < 3; ++axis) {
                    const Index place = at[axis] * call.stride[axis] - call.padding[axis] + step[axis];
                    inside &= place >= 0 && place < call.in_size[axis];
                    pixel = pixel * call.in_size[axis] + place;
                    byte += step[axis] * call.place_step[axis];
                }
                if (inside) found.push_back({pixel * call.pixel + channel, static_cast<int>(byte)});
            }
    return found;
}

template <typename Stored>
void both(Draw& draw, ShoalMaxPool& call) {
    const Index inputs = elements(call, call.in_size), outputs = elements(call, call.out_size);
    Buffer<Stored> x(draw, "x", Use::kRead, inputs), pooled(draw, "pooled", Use::kWritten, outputs);
    Buffer<std::uint8_t> bytes(draw, "places", Use::kWritten, outputs);
    for (Index i = 0; i < inputs; ++i)
        put(x.at(0, i), draw.chance(2) ? std::nanf("") : static_cast<float>(draw.from(call.after_relu ? 0 : -4, 4)));
    call.x = x.data();
    call.pooled = pooled.data();
    call.places = bytes.data();
    guarded({&x, &pooled, &bytes}, [&] { shoal_max_pool(&call); });

    Buffer<Stored> grad(draw, "grad", Use::kRead, outputs), grad_x(draw, "grad_x", Use::kWritten, inputs);
    std::vector<float> wanted(static_cast<std::size_t>(inputs), 0.0f);
    for (Index i = 0; i < outputs; ++i) {
        put(grad.at(0, i), static_cast<float>(draw.from(-3, 3)));
        const std::vector<Place> read = places(call, i);
        Place best = read.front();
        for (const Place& one : read) {
            const float value = value_of(x.at(0, one.at));
            if (value > value_of(x.at(0, best.at)) || std::isnan(value)) best = one;
        }
        const float most = value_of(x.at(0, best.at)), found = value_of(pooled.at(0, i));
        if (!(found == most || (std::isnan(found) && std::isnan(most))))
            fail("result %lld: %g, expected %g", static_cast<long long>(i), found, most);
        const bool none = call.after_relu && most == 0.0f;
        if (bytes.at(0, i) != (none ? 255 : best.byte))
            fail("place %lld: %d, expected %d", static_cast<long long>(i), bytes.at(0, i), none ? 255 : best.byte);
        if (!none) wanted[static_cast<std::size_t>(best.at)] += value_of(grad.at(0, i));
    }
    const bool damaged = draw.chance(10);  // whatever the bytes are, nothing else is touched
    for (Index i = 0; damaged && i < outputs; ++i) bytes.at(0, i) = static_cast<std::uint8_t>(draw.from(0, 255));
    call.grad = grad.data();
    call.grad_x = grad_x.data();
    guarded({&grad, &bytes, &grad_x}, [&] { shoal_max_pool_backward(&call); });
    for (Index i = 0; !damaged && i < inputs; ++i)
        if (value_of(grad_x.at(0, i)) != wanted[static_cast<std::size_t>(i)])
            fail("gradient %lld: %g, expected %g", static_cast<long long>(i), value_of(grad_x.at(0, i)),
                 wanted[static_cast<std::size_t>(i)]);
}

}  // namespace

void max_pool(Draw& draw) {
    ShoalMaxPool call{};
    call.level = static_cast<std::int32_t>(draw.from(-1, shoal_norm_conv_level()));
    call.threads = draw.of({1, 2, 3});
    call.bfloat16 = draw.chance(50);
    call.after_relu = draw.chance(50);
    const bool flat = draw.chance(60);
    const Index most[3] = {flat ? 1 : 5, 8, 70};
    for (int axis = 0; axis < 3; ++axis) {
        call.in_size[axis] = draw.size(most[axis]);
        call.kernel[axis] = flat && axis == 0 ? 1 : draw.from(1, 5);
        call.stride[axis] = draw.from(1, 4);
        call.padding[axis] = draw.from(0, call.kernel[axis] / 2);
        call.kernel[axis] = std::min(call.kernel[axis], call.in_size[axis] + 2 * call.padding[axis]);
        call.padding[axis] = std::min(call.padding[axis], call.kernel[axis] / 2);
        const Index room = call.in_size[axis] + 2 * call.padding[axis] - call.kernel[axis];
        call.out_size[axis] = room / call.stride[axis] + 1;
        // Rounded up, where the last window begins in the input or before it.
        if (draw.chance(50) && call.out_size[axis] * call.stride[axis] < call.in_size[axis] + call.padding[axis])
            ++call.out_size[axis];
    }
    call.pixel = draw.chance(40) ? 1 : draw.size(80);
    call.planes = draw.from(1, 3);
    call.place_step[2] = 1;
    call.place_step[1] = call.kernel[2];
    call.place_step[0] = call.kernel[1] * call.kernel[2];
    now_running("max_pool: %lld planes of %lld x %lld x %lld x %lld, kernel %lld %lld %lld, stride %lld %lld %lld, padding "
                "%lld %lld %lld, bfloat16 %d, after_relu %d, %d threads, level %d",
                static_cast<long long>(call.planes), static_cast<long long>(call.in_size[0]),
                static_cast<long long>(call.in_size[1]), static_cast<long long>(call.in_size[2]),
                static_cast<long long>(call.pixel), static_cast<long long>(call.kernel[0]),
                static_cast<long long>(call.kernel[1]), static_cast<long long>(call.kernel[2]),
                static_cast<long long>(call.stride[0]), static_cast<long long>(call.stride[1]),
                static_cast<long long>(call.stride[2]), static_cast<long long>(call.padding[0]),
                static_cast<long long>(call.padding[1]), static_cast<long long>(call.padding[2]), call.bfloat16,
                call.after_relu, call.threads, call.level);
    if (call.bfloat16) both<std::uint16_t>(draw, call);
    else both<float>(draw, call);
}

}  // namespace fuzz
