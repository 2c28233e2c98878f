// Rows of activations and of results, for every kernel that multiplies.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kChunk = 256;  // rows of x per pass over the weights

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Working memory of a thread, kept between calls; on a cache line.
class Scratch {
  public:
    template <class T>
    T* get(int64_t count) {
        bytes_.resize(count * sizeof(T) + 64 > bytes_.size() ? count * sizeof(T) + 64 : bytes_.size());
        return (T*)round_up((int64_t)bytes_.data(), 64);
    }

  private:
    std::vector<char> bytes_;
};

inline void write(float* y, const float* bias, int64_t count, bool accumulate, const float* values) {
    for (int64_t n = 0; n < count; ++n) {
        const float value = values[n] + (bias ? bias[n] : 0.0f);
        y[n] = accumulate ? y[n] + value : value;
    }
}

// Writes the remaining outputs of a panel. The usual number is a constant: its loop becomes a few vector instructions.
template <int64_t panel>
inline void write_panel(float* y, const float* bias, int64_t left, bool accumulate, const float* values) {
    if (left >= panel) write(y, bias, panel, accumulate, values);
    else write(y, bias, left, accumulate, values);
}

// Largest magnitude, at least `least`; NaN if any value is NaN or infinite: as integers, the bits of magnitudes order
// like the magnitudes, and those of infinity and NaN are above all others.
inline float absmax(const float* row, int64_t count, float least) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
        int32_t bits;
        std::memcpy(&bits, row + i, 4);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000) return NAN;
    float value;
    std::memcpy(&value, &most, 4);
    return value > least ? value : least;
}

constexpr float kLeast = 1e-30f;  // rows below it become zeros; their inverse scale is still finite

// The dividend's type keeps the quotient exact even if the compiler uses reciprocals of floats.
inline float quotient(double a, float b) { return float(a / double(b)); }

inline int32_t to_int(float value) { return int32_t(std::nearbyint(value)); }

// Conversion of a row of x to integers of at most `limit`, and back.
struct RowScale {
    float scale, inverse;
    RowScale(const float* row, int64_t k, int32_t limit) {
        const float largest = absmax(row, k, kLeast);
        scale = quotient(largest, limit);
        // The integers of a non-finite row must not depend on the conversion of NaN.
        inverse = largest != largest ? 0.0f : quotient(limit, largest);
    }
    RowScale() = default;
};

}  // namespace
