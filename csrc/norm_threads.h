// How the drivers share a call: the caller's workspace cut into pieces, and work dealt out to threads.
#pragma once

#include <cstdint>
#include <vector>

#include "norm_conv.h"

namespace shoal {

inline std::int64_t up(std::int64_t value, std::int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Hands out the caller's workspace piece by piece, each at a cache line of its own; from null it only counts.
class Workspace {
public:
    explicit Workspace(void* at) : at_(static_cast<char*>(at)) {}

    template <typename T>
    T* take(std::int64_t count) {
        T* piece = at_ ? reinterpret_cast<T*>(at_ + bytes) : nullptr;
        bytes += up(count * std::int64_t{sizeof(T)}, 64);
        return piece;
    }

    std::int64_t bytes = 0;

private:
    char* at_;
};

// What a thread sums: statistics of y, and in backward da and da * (x - mean).
inline void take_results(Workspace& space, const ShoalNormConv& call, std::int64_t padded_out, bool backward, Scratch& own) {
    if (backward) {
        own.total = space.take<double>(call.in_channels);
        own.centred = space.take<double>(call.in_channels);
        return;
    }
    own.pivot = space.take<float>(padded_out);
    own.sum = space.take<float>(padded_out);
    own.square = space.take<float>(padded_out);
    own.moments = {0, space.take<double>(call.out_channels), space.take<double>(call.out_channels)};
}

// body(thread) for every thread, whether the runtime gives us as many or not.
template <typename Body>
void on_threads(int threads, Body body) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(static, 1)
#endif
    for (int thread = 0; thread < threads; ++thread) body(thread);
}

// body(number) for a thread's share of `count`
template <typename Body>
void on_share(std::int64_t count, int thread, int threads, Body body) {
    const std::int64_t last = count * (thread + 1) / threads;
    for (std::int64_t number = count * thread / threads; number < last; ++number) body(number, last);
}

// What a gradient through the statistics of y adds to each pixel: constant + slope * (y - mean_y).
inline void line_of_statistics(const ShoalNormConv& call, float* constant, float* slope) {
    const double each = 1.0 / double(call.images * call.height * call.width);
    for (std::int64_t c = 0; c < call.out_channels; ++c) {
        constant[c] = float(call.grad_mean_y[c] * each);
        slope[c] = float(2 * call.grad_variance_y[c] * each);
    }
}

// The sums that threads made for each channel, put together.
template <typename Float>
inline void finish_sums(const std::vector<Scratch>& parts, std::int64_t channels, Float* sum, Float* sum_of_centred) {
    for (std::int64_t c = 0; c < channels; ++c) {
        double total = 0, centred = 0;
        for (const Scratch& own : parts) {
            total += own.total[c];
            centred += own.centred[c];
        }
        sum[c] = Float(total);
        sum_of_centred[c] = Float(centred);
    }
}

inline void finish_moments(const std::vector<Scratch>& parts, std::int64_t channels, float* mean, float* variance) {
    std::vector<Moments> moments;
    for (const Scratch& own : parts) moments.push_back(own.moments);
    finish(moments.data(), int(moments.size()), channels, mean, variance);
}

}  // namespace shoal
