// The lanes of max pooling. Included by one file an instruction set, which chooses kLanes. No function of the standard
// library here: the linker might keep the copy compiled for the wider instruction set and call it from everywhere.
#pragma once

#include <cstring>

#include "max_pool.h"

namespace shoal {
namespace {

template <int kCount>
struct Vectors {
    typedef float Floats __attribute__((vector_size(kCount * 4)));
    typedef std::int32_t Ints __attribute__((vector_size(kCount * 4)));
    typedef std::uint32_t Words __attribute__((vector_size(kCount * 4)));
    typedef std::uint64_t Pairs __attribute__((vector_size(kCount * 8)));
    typedef std::uint16_t Halves __attribute__((vector_size(kCount * 2)));
    typedef std::uint8_t Bytes __attribute__((vector_size(kCount)));
};

template <typename Vector>
inline void load(const void* from, Vector& value) {
    std::memcpy(&value, from, sizeof value);
}

template <typename Vector>
inline void store(void* to, const Vector& value) {
    std::memcpy(to, &value, sizeof value);
}

enum class From { kEach, kEven, kOdd };  // every element, or the first or the second of each two

struct Float32 {
    using Stored = float;

    static float one(const Stored* from) { return *from; }
    static void put(Stored* to, float value) { *to = value; }

    template <int kCount, From kFrom>
    static void read(const Stored* from, typename Vectors<kCount>::Floats& values) {
        if (kFrom == From::kEach) return load(from, values);
        typename Vectors<kCount>::Pairs pairs;
        load(from, pairs);
        if (kFrom == From::kOdd) pairs >>= 32;
        const auto words = __builtin_convertvector(pairs, typename Vectors<kCount>::Words);
        std::memcpy(&values, &words, sizeof values);
    }
    template <int kCount>
    static void put(Stored* to, const typename Vectors<kCount>::Floats& values) {
        store(to, values);
    }
    template <int kCount>
    static void add(typename Vectors<kCount>::Floats& sums, const typename Vectors<kCount>::Floats& values) {
        sums += values;
    }
    static float sum(float one, float other) { return one + other; }
};

struct Bfloat16 {
    using Stored = std::uint16_t;

    static float one(const Stored* from) { return seen_as<float>(static_cast<std::uint32_t>(*from) << 16); }
    static void put(Stored* to, float value) { *to = static_cast<Stored>(seen_as<std::uint32_t>(value) >> 16); }

    template <int kCount, From kFrom>
    static void read(const Stored* from, typename Vectors<kCount>::Floats& values) {
        typename Vectors<kCount>::Words words;
        if (kFrom == From::kEach) {
            typename Vectors<kCount>::Halves halves;
            load(from, halves);
            words = __builtin_convertvector(halves, typename Vectors<kCount>::Words) << 16;
        } else {
            load(from, words);
            if (kFrom == From::kEven) words <<= 16;
            else words &= 0xffff0000u;
        }
        std::memcpy(&values, &words, sizeof values);
    }
    template <int kCount>
    static void put(Stored* to, const typename Vectors<kCount>::Floats& values) {
        typename Vectors<kCount>::Words words;
        std::memcpy(&words, &values, sizeof values);
        store(to, __builtin_convertvector(words >> 16, typename Vectors<kCount>::Halves));
    }
    template <int kCount>
    static void add(typename Vectors<kCount>::Floats& sums, const typename Vectors<kCount>::Floats& values) {
        sums += values;
        typename Vectors<kCount>::Words words;
        std::memcpy(&words, &sums, sizeof sums);
        words = (words + 0x7fff + ((words >> 16) & 1)) & 0xffff0000u;
        std::memcpy(&sums, &words, sizeof sums);
    }
    static float sum(float one, float other) { return seen_as<float>(rounded_to_half(seen_as<std::uint32_t>(one + other))); }
};

template <typename Kind, int kCount, From kFrom>
inline void winners_of_vector(const PoolWinners& call, std::int64_t lane) {
    using Floats = typename Vectors<kCount>::Floats;
    using Ints = typename Vectors<kCount>::Ints;
    const auto* x = static_cast<const typename Kind::Stored*>(call.x) + lane * call.stride - (kFrom == From::kOdd);
    Floats best, value;
    Kind::template read<kCount, kFrom>(x + call.reads[0].at, best);
    Ints place = Ints{} + call.reads[0].place;
    for (int r = 1; r < call.count; ++r) {
        Kind::template read<kCount, kFrom>(x + call.reads[r].at, value);
        const Ints wins = (value > best) | (value != value);
        best = wins ? value : best;
        place = wins ? Ints{} + call.reads[r].place : place;
    }
    if (call.after_relu) place |= (best == 0.0f) & kNoPlace;
    Kind::template put<kCount>(static_cast<typename Kind::Stored*>(call.pooled) + lane, best);
    // By two steps: compilers take a step of more apart, element by element.
    const auto halves = __builtin_convertvector(place, typename Vectors<kCount>::Halves);
    store(call.places + lane, __builtin_convertvector(halves, typename Vectors<kCount>::Bytes));
}

template <typename Kind>
inline void winner(const PoolWinners& call, std::int64_t lane) {
    const auto* x = static_cast<const typename Kind::Stored*>(call.x) + lane * call.stride;
    float best = Kind::one(x + call.reads[0].at);
    std::int32_t place = call.reads[0].place;
    for (int r = 1; r < call.count; ++r) {
        const float value = Kind::one(x + call.reads[r].at);
        const bool wins = (value > best) | (value != value);
        best = wins ? value : best;
        place = wins ? call.reads[r].place : place;
    }
    Kind::put(static_cast<typename Kind::Stored*>(call.pooled) + lane, best);
    call.places[lane] = static_cast<std::uint8_t>(call.after_relu && best == 0.0f ? kNoPlace : place);
}

// Whether there were as many lanes as a vector has: the last of them then overlaps the one before.
template <typename Kind, int kCount>
inline bool winners_in_vectors(const PoolWinners& call) {
    std::int64_t lane = 0;
    if (call.stride == 1) {
        for (; lane + kCount <= call.lanes; lane += kCount) winners_of_vector<Kind, kCount, From::kEach>(call, lane);
        if (lane && lane < call.lanes) winners_of_vector<Kind, kCount, From::kEach>(call, call.lanes - kCount);
    } else if (call.stride == 2) {  // it reads the element behind its last too, or before its first: another lane's
        for (; lane + kCount < call.lanes; lane += kCount) winners_of_vector<Kind, kCount, From::kEven>(call, lane);
        if (lane) winners_of_vector<Kind, kCount, From::kOdd>(call, call.lanes - kCount);
    }
    return lane > 0;
}

template <typename Kind, int kCount>
inline void winners_from(const PoolWinners& call) {
    if (winners_in_vectors<Kind, kCount>(call)) return;
    if constexpr (kCount > 4) return winners_from<Kind, kCount / 2>(call);
    for (std::int64_t lane = 0; lane < call.lanes; ++lane) winner<Kind>(call, lane);
}

template <typename Kind>
void winners(const PoolWinners& call) {
    winners_from<Kind, kLanes>(call);
}

template <typename Kind, int kCount, int kVectors>
inline void gradients_of_vectors(const PoolGradients& call, std::int64_t lane) {
    using Floats = typename Vectors<kCount>::Floats;
    using Ints = typename Vectors<kCount>::Ints;
    const auto* grad = static_cast<const typename Kind::Stored*>(call.grad) + lane;
    const std::uint8_t* places = call.places + lane;
    Floats sums[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] = Floats{};
    for (int r = 0; r < call.count; ++r) {
        const Ints own = Ints{} + call.reads[r].place;
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            typename Vectors<kCount>::Bytes bytes;
            load(places + call.reads[r].at + v * kCount, bytes);
            const auto halves = __builtin_convertvector(bytes, typename Vectors<kCount>::Halves);
            Floats values;
            Kind::template read<kCount, From::kEach>(grad + call.reads[r].at + v * kCount, values);
            values = __builtin_convertvector(halves, Ints) == own ? values : Floats{};
            Kind::template add<kCount>(sums[v], values);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v)
        Kind::template put<kCount>(static_cast<typename Kind::Stored*>(call.grad_x) + lane + v * kCount, sums[v]);
}

template <typename Kind>
inline void gradient(const PoolGradients& call, std::int64_t lane) {
    float sum = 0.0f;
    for (int r = 0; r < call.count; ++r) {
        const std::int64_t at = call.reads[r].at + lane;
        const float value = Kind::one(static_cast<const typename Kind::Stored*>(call.grad) + at);
        sum = Kind::sum(sum, call.places[at] == call.reads[r].place ? value : 0.0f);
    }
    Kind::put(static_cast<typename Kind::Stored*>(call.grad_x) + lane, sum);
}

template <typename Kind>
void gradients(const PoolGradients& call) {
    std::int64_t lane = 0;
    for (; lane + 4 * kLanes <= call.lanes; lane += 4 * kLanes) gradients_of_vectors<Kind, kLanes, 4>(call, lane);
    for (; lane + kLanes <= call.lanes; lane += kLanes) gradients_of_vectors<Kind, kLanes, 1>(call, lane);
    for (; lane < call.lanes; ++lane) gradient<Kind>(call, lane);
}

constexpr PoolLevel kPool = {{&winners<Float32>, &winners<Bfloat16>}, {&gradients<Float32>, &gradients<Bfloat16>}};

}  // namespace
}  // namespace shoal
