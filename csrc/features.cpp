#include "shoal_native.h"

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

namespace {

// GCC before 11 and Clang before 19 do not know it by name; AVX is there only where the system saves its registers.
bool has_f16c() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

}  // namespace
#endif

namespace {

std::uint64_t features_here() {
    std::uint64_t features = 0;
#if defined(__x86_64__) || defined(__i386__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) features |= SHOAL_AVX2;
    if (__builtin_cpu_supports("fma")) features |= SHOAL_FMA;
    if (has_f16c()) features |= SHOAL_F16C;
    if (__builtin_cpu_supports("avx512f")) features |= SHOAL_AVX512F;
    if (__builtin_cpu_supports("avx512bw")) features |= SHOAL_AVX512BW;
    if (__builtin_cpu_supports("avx512vl")) features |= SHOAL_AVX512VL;
    if (__builtin_cpu_supports("avx512vbmi")) features |= SHOAL_AVX512VBMI;
    if (__builtin_cpu_supports("avx512bf16")) features |= SHOAL_AVX512BF16;
#elif defined(__aarch64__)
    features |= SHOAL_NEON;  // part of every AArch64
#endif
    return features;
}

}  // namespace

SHOAL_API std::int32_t shoal_abi_version() { return SHOAL_ABI_VERSION; }

SHOAL_API std::uint64_t shoal_cpu_features() {
    static const std::uint64_t features = features_here();  // a virtual machine takes microseconds for cpuid
    return features;
}
