// y[M, N] = x[M, K] w[N, K]^T (+ bias, + y) on one core, in float32 arithmetic, with weights in float32 or bfloat16.
// Uses no header of torch or Python.
//
// The weights are packed once: panels of two vectors of rows, each contiguous along K, [N / panel][K][rows of the
// panel], padded with zeros. A tile of some rows of x and a panel keeps its sums in registers. Each number of x is
// multiplied by two vectors of weights, so no sum over lanes remains. A block of K of a panel stays in L1 while all
// rows of x pass.
//
// An output sums its products in the order of K for every M, so a row's bits do not depend on other rows.

#include <utility>

#include "rows.h"
#include "vectors.h"

namespace {

constexpr int64_t kPanel = 2 * kLanes;        // rows of w
constexpr int64_t kBlock = 256;               // of K: half of L1, or two thirds, in float32
constexpr int kTile = kLanes == 16 ? 12 : 6;  // rows of x: 24 sums of 32 registers, or 12 of 16

template <class T>
using Multiply = void (*)(const float*, int64_t, const T*, int64_t, float*, bool, const T*, int64_t);

// Prefetches `step` numbers for each of K from `ahead` on.
template <class T, int MR>
void tile(
    const float* x, int64_t stride, const T* w, int64_t count, float* sums, bool first, const T* ahead, int64_t step) {
    Floats sum[MR][2] = {};
    if (!first) std::memcpy(sum, sums, sizeof(sum));
    for (int64_t k = 0; k < count; ++k, w += kPanel, ahead += step) {
        __builtin_prefetch(ahead, 0, 2);
        const Floats w0 = widen<kLanes>(w), w1 = widen<kLanes>(w + kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < MR; ++m) {
            const float value = x[m * stride + k];
            sum[m][0] += value * w0;
            sum[m][1] += value * w1;
        }
    }
    std::memcpy(sums, sum, sizeof(sum));
}

template <class T, int... counts>
Multiply<T> tile_of(int64_t rows, std::integer_sequence<int, counts...>) {
    static constexpr Multiply<T> tiles[] = {tile<T, counts + 1>...};
    return tiles[rows - 1];
}

template <class T>
void linear(
    const float* x, const T* w, const float* bias, float* y, int64_t num_m, int64_t num_n, int64_t k, int accumulate) {
    alignas(64) static thread_local float sums[kChunk * kPanel];
    for (int64_t first = 0; first < num_m; first += kChunk, x += kChunk * k, y += kChunk * num_n) {
        const int64_t rows = num_m - first < kChunk ? num_m - first : kChunk, num_tiles = (rows + kTile - 1) / kTile;
        const T* panel = w;
        for (int64_t n = 0; n < num_n; n += kPanel) {
            for (int64_t start = 0; start < k; start += kBlock) {
                const int64_t count = k - start < kBlock ? k - start : kBlock;
                const T* const next = panel + count * kPanel;
                for (int64_t t = 0; t < num_tiles; ++t) {
                    const int64_t m = rows * t / num_tiles, num = rows * (t + 1) / num_tiles - m;
                    // The next block is prefetched with the last rows. Past the end that is harmless.
                    const int64_t step = t + 1 == num_tiles ? kPanel : 0;
                    const auto multiply = tile_of<T>(num, std::make_integer_sequence<int, kTile>());
                    multiply(x + m * k + start, k, panel, count, sums + m * kPanel, start == 0, next, step);
                }
                panel = next;
            }
            for (int64_t m = 0; m < rows; ++m)
                write_panel<kPanel>(y + m * num_n + n, bias ? bias + n : nullptr, num_n - n, accumulate, sums + m * kPanel);
        }
    }
}

template <class T>
inline void transpose(const T* w, int64_t rows, int64_t k, int64_t count, T* to) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i) to[i * kPanel + row] = w[row * k + i];
}

template <class T>
void pack(const T* w, int64_t num_n, int64_t k, T* to) {
    for (int64_t n = 0; n < num_n; n += kPanel, w += kPanel * k, to += kPanel * k) {
        const int64_t rows = num_n - n < kPanel ? num_n - n : kPanel;
        if (rows < kPanel) std::memset((void*)to, 0, kPanel * k * sizeof(T));
        // Cache lines, so that none is read twice. The usual number is a constant, which becomes vector instructions.
        for (int64_t start = 0; start < k; start += 16) {
            if (rows == kPanel && k - start >= 16) transpose(w + start, kPanel, k, 16, to + start * kPanel);
            else transpose(w + start, rows, k, k - start < 16 ? k - start : 16, to + start * kPanel);
        }
    }
}

// Multiplies tiles with all operands in L1. Returns the number of multiplications.
template <class T>
int64_t peak(int64_t count) {
    alignas(64) static thread_local float x[kTile * kBlock], sums[kTile * kPanel];
    alignas(64) static thread_local T w[kBlock * kPanel];
    volatile int64_t rows = kTile;  // unknown to the compiler, which would optimize a constant
    const auto multiply = tile_of<T>(rows, std::make_integer_sequence<int, kTile>());
    for (int64_t i = 0; i < count; ++i) multiply(x, kBlock, w, kBlock, sums, true, w, 0);
    return count * kTile * kPanel * kBlock;
}

}  // namespace

extern "C" {

const char* instructions() { return LLAMARL_INSTRUCTIONS; }

#define LLAMARL_PANELS(kind, T)                                                                                        \
    int64_t packed_bytes_##kind(int64_t n, int64_t k) { return round_up(n, kPanel) * k * int64_t(sizeof(T)); }         \
    void pack_##kind(const T* w, int64_t n, int64_t k, T* out) { pack(w, n, k, out); }                                 \
    int64_t linear_##kind##_peak(int64_t count) { return peak<T>(count); }                                             \
    void linear_##kind(                                                                                                \
        const float* x, const T* w, const float* bias, float* y, int64_t m, int64_t n, int64_t k, int accumulate) {    \
        linear(x, w, bias, y, m, n, k, accumulate);                                                                    \
    }
LLAMARL_PANELS(float32, float)
LLAMARL_PANELS(bfloat16, uint16_t)
}
