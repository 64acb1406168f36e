// Random calls of the native kernels, checked against plain loops. Built and run by `make sanitize`.
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fuzz.h"
#include "report.h"
#include "shoal_native.h"

#if SHOAL_FUZZ_ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef SHOAL_FUZZ_NARROW
#define SHOAL_FUZZ_NARROW 0
#endif

namespace fuzz {
namespace {

struct Kernel {
    const char* name;
    void (*run)(Draw&);
    int weight;  // of 100 cases
    std::int64_t cases;
};

Kernel kernels[] = {
    {"norm_conv", &norm_conv, 20, 0},
    {"direct_conv", &direct_conv, 12, 0},
    {"norm_pass", &norm_pass, 25, 0},
    {"codec", &codec, 14, 0},
    {"gradient_sweeps", &gradient_sweeps, 10, 0},
    {"max_pool", &max_pool, 8, 0},
    {"layout", &layout, 10, 0},
    {"features", &features, 1, 0},
};

struct Options {
    std::uint64_t seed = 1;
    std::int64_t first = 0, cases = 1000;
    double seconds = 1e9;
    const char* only = nullptr;
};

// Fixed memory: it is read while the program dies.
char g_running[512] = "nothing yet";
std::uint64_t g_seed = 0;
std::int64_t g_case = 0;
const char* g_only = nullptr;

void print_running() {
    std::fprintf(
        stderr,
        "while running %s\ncase %lld of seed %llu; once more: shoal_fuzz --seed %llu --first %lld --cases 1%s%s\n",
        g_running, static_cast<long long>(g_case), static_cast<unsigned long long>(g_seed),
        static_cast<unsigned long long>(g_seed), static_cast<long long>(g_case), g_only ? " --only " : "",
        g_only ? g_only : "");
}

Options parsed(int count, char** arguments) {
    Options options;
    bool understood = count % 2;  // the program's name, and pairs
    for (int i = 1; i + 1 < count; i += 2) {
        const char *name = arguments[i], *value = arguments[i + 1];
        if (!std::strcmp(name, "--seed")) options.seed = std::strtoull(value, nullptr, 10);
        else if (!std::strcmp(name, "--first")) options.first = std::atoll(value);
        else if (!std::strcmp(name, "--cases")) options.cases = std::atoll(value);
        else if (!std::strcmp(name, "--seconds")) options.seconds = std::atof(value);
        else if (!std::strcmp(name, "--only")) options.only = value;
        else understood = false;
    }
    bool known = !options.only;
    for (const Kernel& kernel : kernels) known |= options.only && !std::strcmp(options.only, kernel.name);
    if (understood && known && options.cases > 0) return options;
    std::fprintf(stderr, "usage: shoal_fuzz [--seed 1] [--first 0] [--cases 1000] [--seconds at most] [--only");
    for (const Kernel& kernel : kernels) std::fprintf(stderr, " %s%s", &kernel == kernels ? "" : "| ", kernel.name);
    std::fprintf(stderr, "]\n");
    std::exit(2);
}

Kernel& kernel_of(Draw& draw, const char* only) {
    std::int64_t left = draw.from(0, 99);
    for (Kernel& kernel : kernels) {
        if (only ? !std::strcmp(only, kernel.name) : left < kernel.weight) return kernel;
        left -= kernel.weight;
    }
    return kernels[0];
}

}  // namespace

void now_running(const char* format, ...) {
    std::va_list values;
    va_start(values, format);
    std::vsnprintf(g_running, sizeof g_running, format, values);
    va_end(values);
}

void fail(const char* format, ...) {
    char text[512];
    std::va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    throw Failure(text);
}

void features(Draw& draw) {
    now_running("features and what is refused");
    if (shoal_abi_version() != SHOAL_ABI_VERSION) fail("the ABI is version %d", shoal_abi_version());
    if (shoal_cpu_features() != shoal_cpu_features()) fail("the processor changed");
    ShoalNormConv convolution{};
    ShoalNormWeightGrad weight{};
    ShoalNormPass pass{};
    convolution.level = weight.level = pass.level = static_cast<std::int32_t>(draw.from(SHOAL_AVX512_LEVEL + 1, 1000));
    if (shoal_norm_conv_workspace_bytes(&convolution, 0) ||
        shoal_norm_conv_forward(&convolution) != SHOAL_NO_SUCH_LEVEL ||
        shoal_norm_conv_backward(&convolution) != SHOAL_NO_SUCH_LEVEL ||
        shoal_norm_weight_grad_workspace_bytes(&weight) || shoal_norm_weight_grad(&weight) != SHOAL_NO_SUCH_LEVEL ||
        shoal_norm_statistics(&pass) != SHOAL_NO_SUCH_LEVEL || shoal_norm_apply(&pass) != SHOAL_NO_SUCH_LEVEL ||
        shoal_norm_reduce(&pass) != SHOAL_NO_SUCH_LEVEL || shoal_norm_apply_backward(&pass) != SHOAL_NO_SUCH_LEVEL)
        fail("level %d is not refused", pass.level);
    ShoalTableCodec table{};
    ShoalTableMean mean{};
    ShoalTruncation truncation{};
    ShoalBits bits{};
    ShoalMaxPool pool{};
    pool.level = pass.level;
    if (shoal_max_pool(&pool) != SHOAL_NO_SUCH_LEVEL || shoal_max_pool_backward(&pool) != SHOAL_NO_SUCH_LEVEL)
        fail("level %d is not refused by max pooling", pass.level);
    mean.codec.level = table.level = truncation.level = bits.level = pass.level;
    for (const std::int32_t outcome :
         {shoal_table_encode(&table), shoal_table_decode(&table), shoal_table_mean(&mean),
          shoal_truncation_pack(&truncation), shoal_truncation_unpack(&truncation), shoal_one_bit_encode(&bits),
          shoal_one_bit_decode(&bits), shoal_sign_mask_encode(&bits), shoal_sign_mask_decode(&bits)})
        if (outcome != SHOAL_NO_SUCH_LEVEL) fail("level %d is not refused by a codec", pass.level);
}

int run(const Options& options) {
    const auto begin = std::chrono::steady_clock::now();
    const auto seconds = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    std::int64_t ran = 0;
    for (; ran < options.cases && seconds() < options.seconds; ++ran) {
        g_case = options.first + ran;
        Draw draw(options.seed, static_cast<std::uint64_t>(g_case));
        Kernel& kernel = kernel_of(draw, options.only);
        try {
            kernel.run(draw);
        } catch (const Failure& failure) {
            std::fprintf(stderr, "%s\n", failure.what());
            print_running();
            return 1;
        }
        ++kernel.cases;
    }
    std::printf("Levels to %d%s, %s.", shoal_norm_conv_level(), SHOAL_FUZZ_NARROW ? " (2 in AVX2's instructions)" : "",
                SHOAL_FUZZ_ADDRESS_SANITIZER ? "sanitized" : "not sanitized");
    for (const Kernel& kernel : kernels) std::printf(" %s: %lld.", kernel.name, static_cast<long long>(kernel.cases));
    std::printf("\n%lld cases of seed %llu in %.0f s: nothing wrong\n", static_cast<long long>(ran),
                static_cast<unsigned long long>(options.seed), seconds());
    return 0;
}

}  // namespace fuzz

int main(int count, char** arguments) {
    const fuzz::Options options = fuzz::parsed(count, arguments);
    fuzz::g_seed = options.seed;
    fuzz::g_only = options.only;
#if SHOAL_FUZZ_ADDRESS_SANITIZER
    __sanitizer_set_death_callback(&fuzz::print_running);
#endif
    return fuzz::run(options);
}
