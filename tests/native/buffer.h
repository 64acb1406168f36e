// Tensors in memory of their own, as long as csrc/shoal_native.h says and not a byte longer.
//
// What lies between pixels belongs to somebody else: it holds NaNs, is poisoned for AddressSanitizer during a call, and
// must be the same afterwards. So must all that a call only reads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "draw.h"
#include "report.h"

#if SHOAL_FUZZ_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

namespace fuzz {

// Owns one allocation that begins at a multiple of `alignment` plus `lead` bytes that are nobody's.
class Memory {
public:
    Memory(std::size_t bytes, std::size_t lead, std::size_t alignment) : lead_(lead), bytes_(bytes) {
        void* found = nullptr;
        if (posix_memalign(&found, alignment, lead + bytes) != 0) throw std::bad_alloc();
        memory_ = static_cast<char*>(found);
        if (lead + bytes) std::memset(memory_, 0xff, lead + bytes);  // NaNs, as floats and as doubles
    }
    ~Memory() {
        ASAN_UNPOISON_MEMORY_REGION(memory_, lead_ + bytes_);
        std::free(memory_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* at() const { return memory_ + lead_; }
    std::size_t lead() const { return lead_; }
    std::size_t bytes() const { return bytes_; }

private:
    char* memory_ = nullptr;
    std::size_t lead_, bytes_;
};

enum class Use { kRead, kWritten };

class Guarded {
public:
    virtual ~Guarded() = default;
    virtual void close() = 0;  // before the call
    virtual void open() = 0;   // after it; throws Failure where the call wrote what is not its own
};

// `rows` of `width` numbers, `row_stride` apart; the last has no gap behind it.
template <typename T>
class Buffer : public Guarded {
public:
    Buffer(Draw& draw, const char* name, Use use, std::int64_t rows, std::int64_t width, std::int64_t row_stride)
        : name_(name), use_(use), rows_(rows), width_(width), row_stride_(row_stride),
          memory_(sizeof(T) * elements(rows, width, row_stride), sizeof(T) * static_cast<std::size_t>(draw.from(0, 15)),
                  64) {}
    Buffer(Draw& draw, const char* name, Use use, std::int64_t width) : Buffer(draw, name, use, 1, width, width) {}

    T* data() const { return reinterpret_cast<T*>(memory_.at()); }
    T& at(std::int64_t row, std::int64_t column) const { return data()[row * row_stride_ + column]; }
    std::int64_t rows() const { return rows_; }
    std::int64_t width() const { return width_; }
    std::int64_t row_stride() const { return row_stride_; }
    const char* name() const { return name_; }

    // Whole numbers of at most `most`: small ones add up exactly in floats, in whatever order.
    void fill(Draw& draw, std::int64_t most, T unit = 1) const {
        for (std::int64_t row = 0; row < rows_; ++row)
            for (std::int64_t column = 0; column < width_; ++column)
                at(row, column) = unit * static_cast<T>(draw.from(-most, most));
    }

    void close() override {
        before_.assign(memory_.at(), memory_.at() + memory_.bytes());
        ASAN_POISON_MEMORY_REGION(memory_.at() - memory_.lead(), memory_.lead());
        for (std::int64_t row = 0; row + 1 < rows_; ++row)
            ASAN_POISON_MEMORY_REGION(data() + row * row_stride_ + width_,
                                      sizeof(T) * static_cast<std::size_t>(row_stride_ - width_));
    }

    void open() override {
        ASAN_UNPOISON_MEMORY_REGION(memory_.at() - memory_.lead(), memory_.lead() + memory_.bytes());
        for (std::size_t byte = 0; byte < memory_.lead(); ++byte)
            if (memory_.at()[-1 - static_cast<std::ptrdiff_t>(byte)] != '\xff')
                fail("%s: written before its begin", name_);
        if (use_ == Use::kRead) {
            if (!before_.empty() && std::memcmp(before_.data(), memory_.at(), before_.size()) != 0)
                fail("%s: written, and only to be read", name_);
            return;
        }
        for (std::int64_t row = 0; row + 1 < rows_; ++row) {
            const std::size_t from = sizeof(T) * static_cast<std::size_t>(row * row_stride_ + width_);
            const std::size_t bytes = sizeof(T) * static_cast<std::size_t>(row_stride_ - width_);
            if (bytes && std::memcmp(before_.data() + from, memory_.at() + from, bytes) != 0)
                fail("%s: written behind row %lld", name_, static_cast<long long>(row));
        }
    }

private:
    static std::size_t elements(std::int64_t rows, std::int64_t width, std::int64_t row_stride) {
        return rows && width ? static_cast<std::size_t>((rows - 1) * row_stride + width) : 0;
    }

    const char* name_;
    Use use_;
    std::int64_t rows_, width_, row_stride_;
    Memory memory_;
    std::vector<char> before_;
};

// Runs `call` while nothing but the tensors themselves may be touched.
template <typename Call>
void guarded(std::initializer_list<Guarded*> buffers, Call call) {
    for (Guarded* buffer : buffers)
        if (buffer) buffer->close();
    call();
    for (Guarded* buffer : buffers)
        if (buffer) buffer->open();
}

}  // namespace fuzz
