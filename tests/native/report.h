// What is running, and what was found wrong with it.
#pragma once

#include <stdexcept>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#define SHOAL_FUZZ_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHOAL_FUZZ_ADDRESS_SANITIZER 1
#endif
#endif
#ifndef SHOAL_FUZZ_ADDRESS_SANITIZER
#define SHOAL_FUZZ_ADDRESS_SANITIZER 0
#endif

namespace fuzz {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Printed with whatever goes wrong from now on, also where a sanitizer ends the program.
__attribute__((format(printf, 1, 2))) void now_running(const char* format, ...);

[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

}  // namespace fuzz
