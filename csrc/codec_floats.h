// Floats and their bits. Included inside an unnamed namespace by each instruction set, so that no copy compiled for a
// wider one is called from elsewhere.

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(std::int32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
