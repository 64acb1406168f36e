# shoal_fuzz: random calls of the kernels against plain loops. `fuzz` runs it as it is, under an emulator where it is of
# another machine; `sanitize` under AddressSanitizer and UndefinedBehaviorSanitizer, or says why it cannot.
option(SHOAL_SANITIZE "Build shoal_fuzz with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
set(SHOAL_FUZZ_SEED 1 CACHE STRING "What the target `sanitize` draws its cases from")
set(SHOAL_FUZZ_CASES 1000 CACHE STRING "How many of them it runs")

set(sources ${SHOAL_SOURCES})
include(CheckCXXSourceRuns)
if(NOT CMAKE_CROSSCOMPILING)
  check_cxx_source_runs("
    #if defined(__x86_64__)
    int main() {
      return !(__builtin_cpu_supports(\"avx2\") && __builtin_cpu_supports(\"fma\") &&
               !__builtin_cpu_supports(\"avx512vl\"));
    }
    #else
    int main() { return 1; }
    #endif" SHOAL_HAS_AVX2_ALONE)
endif()
if(SHOAL_HAS_AVX2_ALONE)
  # The tiles for AVX-512 in AVX2's instructions: they read and write the same addresses, so that no processor is too
  # old to find where they stray.
  set(replaced_features_cpp "return features;")
  set(replacement_features_cpp "return features | SHOAL_AVX512F | SHOAL_AVX512BW | SHOAL_AVX512VL;")
  foreach(name codec_avx512_cpp direct_avx512_cpp max_pool_avx512_cpp norm_avx512_cpp gradient_sweeps_cpp)
    set(replaced_${name} ",avx512f,avx512bw,avx512vl")
    set(replacement_${name} "")
  endforeach()
  foreach(name features.cpp codec_avx512.cpp direct_avx512.cpp max_pool_avx512.cpp norm_avx512.cpp
          gradient_sweeps.cpp)
    string(REPLACE "." "_" key ${name})
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS csrc/${name})
    file(READ csrc/${name} text)
    string(REPLACE "${replaced_${key}}" "${replacement_${key}}" narrow "${text}")
    if(narrow STREQUAL text)
      message(FATAL_ERROR "csrc/${name} has no '${replaced_${key}}' any more: bring tests/native/fuzz.cmake up to date")
    endif()
    set(file ${CMAKE_BINARY_DIR}/narrow/${name})
    file(GENERATE OUTPUT ${file} CONTENT "${narrow}")
    get_source_file_property(options csrc/${name} COMPILE_OPTIONS)
    if(options)
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${options}")
    endif()
    list(REMOVE_ITEM sources csrc/${name})
    list(APPEND sources ${file})
  endforeach()
  # Written in intrinsics, not in the compiler's vectors: they need other names for the instructions.
  set_source_files_properties(${CMAKE_BINARY_DIR}/narrow/codec_avx512.cpp PROPERTIES
    COMPILE_OPTIONS "-include;${CMAKE_SOURCE_DIR}/tests/native/avx512_in_avx2.h")
endif()

add_executable(shoal_fuzz EXCLUDE_FROM_ALL
  tests/native/fuzz_codec.cpp
  tests/native/fuzz_direct_conv.cpp
  tests/native/fuzz_gradient_sweeps.cpp
  tests/native/fuzz_layout.cpp
  tests/native/fuzz_max_pool.cpp
  tests/native/fuzz_norm_conv.cpp
  tests/native/fuzz_norm_pass.cpp
  tests/native/main.cpp
  ${sources})
target_include_directories(shoal_fuzz PRIVATE csrc)
# Vectors of 64 bytes pass through memory without AVX-512; no function of another compiler is called with one.
target_compile_options(shoal_fuzz PRIVATE -Wall -Wextra -Wno-psabi)
target_compile_definitions(shoal_fuzz PRIVATE SHOAL_FUZZ_NARROW=$<BOOL:${SHOAL_HAS_AVX2_ALONE}>)
if(OpenMP_CXX_FOUND)
  target_link_libraries(shoal_fuzz PRIVATE OpenMP::OpenMP_CXX)
endif()

# Threads that wait must not spin: there may be more of them than cores.
set(passive ${CMAKE_COMMAND} -E env OMP_WAIT_POLICY=passive UBSAN_OPTIONS=print_stacktrace=1)
set(drawn --seed ${SHOAL_FUZZ_SEED} --cases ${SHOAL_FUZZ_CASES})
add_custom_target(fuzz COMMAND ${passive} ${CMAKE_CROSSCOMPILING_EMULATOR} $<TARGET_FILE:shoal_fuzz> ${drawn}
  DEPENDS shoal_fuzz USES_TERMINAL VERBATIM)

if(NOT SHOAL_SANITIZE)
  return()
endif()
set(sanitizers -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all)
include(CheckCXXSourceCompiles)
string(REPLACE ";" " " flags "${sanitizers}")
set(CMAKE_REQUIRED_FLAGS ${flags})
check_cxx_source_compiles("int main() { return 0; }" SHOAL_CAN_SANITIZE)
unset(CMAKE_REQUIRED_FLAGS)
if(NOT SHOAL_CAN_SANITIZE)
  add_custom_target(sanitize COMMAND ${CMAKE_COMMAND} -E echo
    "Skipped: ${CMAKE_CXX_COMPILER} does not link a program with ${flags}." VERBATIM)
  return()
endif()
target_compile_options(shoal_fuzz PRIVATE -O1 -g -fno-omit-frame-pointer ${sanitizers})
target_link_options(shoal_fuzz PRIVATE ${sanitizers})
add_custom_target(sanitize COMMAND ${passive} $<TARGET_FILE:shoal_fuzz> ${drawn}
  DEPENDS shoal_fuzz USES_TERMINAL VERBATIM)
