// The passes of a norm over whole tensors: pixels or channels dealt out to threads, sums put together.
#include <algorithm>
#include <vector>

#include "norm_threads.h"

namespace {

// Every thread's part of the workspace: the sums of a block, and two doubles a channel.
std::vector<shoal::Scratch> cut(const ShoalNormPass& call, shoal::Workspace& space) {
    std::vector<shoal::Scratch> all(call.threads);
    for (shoal::Scratch& own : all) {
        own.sum = space.take<float>(call.channels + 16);
        own.square = space.take<float>(call.channels + 16);
        own.total = own.moments.mean = space.take<double>(call.channels);
        own.centred = own.moments.squares = space.take<double>(call.channels);
    }
    return all;
}

std::vector<shoal::Scratch> scratch_of(const ShoalNormPass& call) {
    shoal::Workspace space(call.workspace);
    std::vector<shoal::Scratch> all = cut(call, space);
    for (const shoal::Scratch& own : all) {
        std::fill_n(own.total, call.channels, 0.0);
        std::fill_n(own.centred, call.channels, 0.0);
    }
    return all;
}

// body(thread, its pixels in NHWC order, its channels in NCHW order)
template <typename Body>
void on_parts(const ShoalNormPass& call, Body body) {
    const std::int64_t count = call.channels_last ? call.images * call.pixels : call.channels;
    shoal::on_threads(call.threads, [&](int thread) {
        body(thread, shoal::Rows{count * thread / call.threads, count * (thread + 1) / call.threads});
    });
}

}  // namespace

SHOAL_API std::int64_t shoal_norm_pass_workspace_bytes(const ShoalNormPass* call) {
    shoal::Workspace space(nullptr);
    cut(*call, space);
    return space.bytes;
}

SHOAL_API std::int32_t shoal_norm_statistics(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    if (!call->channels_last) {
        on_parts(*call, [&](int, shoal::Rows part) { level->statistics_planes(*call, part); });
        return SHOAL_DONE;
    }
    std::vector<shoal::Scratch> scratch = scratch_of(*call);
    on_parts(*call, [&](int thread, shoal::Rows part) { level->statistics(*call, part, scratch[thread]); });
    shoal::finish_moments(scratch, call->channels, call->statistic_mean, call->statistic_variance);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_apply(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    on_parts(*call, [&](int, shoal::Rows part) { level->passes[call->activation].apply(*call, part); });
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_reduce(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    std::vector<shoal::Scratch> scratch = scratch_of(*call);
    on_parts(*call, [&](int thread, shoal::Rows part) {
        level->passes[call->activation].reduce(*call, part, scratch[thread]);
    });
    shoal::finish_sums(scratch, call->channels, call->sum, call->sum_of_centred);
    return SHOAL_DONE;
}

SHOAL_API std::int32_t shoal_norm_apply_backward(const ShoalNormPass* call) {
    const shoal::Level* level = shoal::level_of(call->level);
    if (!level) return SHOAL_NO_SUCH_LEVEL;
    on_parts(*call, [&](int, shoal::Rows part) { level->passes[call->activation].apply_backward(*call, part); });
    return SHOAL_DONE;
}
