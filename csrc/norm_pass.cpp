// The passes over whole tensors: rows dealt out to threads, sums put together.
#include <algorithm>
#include <vector>

#include "norm_threads.h"

namespace {

std::int64_t lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Per thread: the sums of a block, and two doubles a channel.
std::int64_t bytes_a_thread(const ShoalNormPass& call) {
    return 2 * lines((call.channels + 16) * std::int64_t{sizeof(float)}) +
           2 * lines(call.channels * std::int64_t{sizeof(double)});
}

template <typename Body>
void on_rows(const ShoalNormPass& call, Body body) {
#ifdef _OPENMP
#pragma omp parallel for num_threads(call.threads) schedule(static, 1)
#endif
    for (int thread = 0; thread < call.threads; ++thread)
        body(thread, shoal::Rows{call.rows * thread / call.threads, call.rows * (thread + 1) / call.threads});
}

std::vector<shoal::Scratch> scratch_of(const ShoalNormPass& call) {
    std::vector<shoal::Scratch> all(call.threads);
    char* at = static_cast<char*>(call.workspace);
    for (shoal::Scratch& own : all) {
        const std::int64_t floats = lines((call.channels + 16) * std::int64_t{sizeof(float)});
        const std::int64_t doubles = lines(call.channels * std::int64_t{sizeof(double)});
        own = {};
        own.sum = reinterpret_cast<float*>(at);
        own.square = reinterpret_cast<float*>(at + floats);
        own.total = own.moments.mean = reinterpret_cast<double*>(at + 2 * floats);
        own.centred = own.moments.squares = reinterpret_cast<double*>(at + 2 * floats + doubles);
        std::fill_n(own.total, call.channels, 0.0);
        std::fill_n(own.centred, call.channels, 0.0);
        at += bytes_a_thread(call);
    }
    return all;
}

}  // namespace

SHOAL_API std::int64_t shoal_norm_pass_workspace_bytes(const ShoalNormPass* call) {
    return call->threads * bytes_a_thread(*call);
}

SHOAL_API std::int32_t shoal_statistics(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    std::vector<shoal::Scratch> scratch = scratch_of(*call);
    on_rows(*call, [&](int thread, shoal::Rows rows) { level->statistics(*call, rows, scratch[thread]); });
    shoal::finish_moments(scratch, call->channels, call->statistic_mean, call->statistic_variance);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_act(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    on_rows(*call, [&](int, shoal::Rows rows) { level->activate(*call, rows); });
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_act_backward(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    std::vector<shoal::Scratch> scratch = scratch_of(*call);
    on_rows(*call, [&](int thread, shoal::Rows rows) { level->activate_backward(*call, rows, scratch[thread]); });
    shoal::finish_sums(scratch, call->channels, call->sum, call->sum_of_centred);
    return SHOAL_DONE;
}
