// Numbers from a seed, the same with every compiler and standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace fuzz {

class Draw {
public:
    // Case `number` of `seed`, whatever was drawn for those before it.
    Draw(std::uint64_t seed, std::uint64_t number) : state_(mixed(seed) ^ mixed(~number)) {}

    std::int64_t from(std::int64_t least, std::int64_t most) {
        return least + static_cast<std::int64_t>(next() % static_cast<std::uint64_t>(most - least + 1));
    }

    bool chance(int percent) { return from(0, 99) < percent; }

    template <typename T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[from(0, static_cast<std::int64_t>(choices.size()) - 1)];
    }

    // 1 to `most`: often very few, often beside what fills vectors, tiles and blocks.
    std::int64_t size(std::int64_t most) {
        if (most < 4 || chance(30)) return from(1, most < 5 ? most : 5);
        if (chance(20)) return from(1, most);
        const std::int64_t unit = of({4, 8, 16, 32, 64, 128, 256, 512});
        const std::int64_t found = unit * from(1, 3) + from(-1, 1);
        return found <= most ? found : from(1, most);
    }

private:
    // SplitMix64 (Steele, Lea and Flood 2014).
    static std::uint64_t mixed(std::uint64_t z) {
        z += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

    std::uint64_t next() { return mixed(state_ += 0x9e3779b97f4a7c15); }

    std::uint64_t state_;
};

}  // namespace fuzz
