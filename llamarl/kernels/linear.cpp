// y[M, N] = x[M, K] w[N, K]^T (+ bias, + y) on one core, with row-major weights in int8, and the quantization of weight
// rows. Uses no header of torch or Python.
//
// Every output is one dot product along K. A panel of 16 weight rows is loaded block by block of K into L1, widened for
// the multiplier. Each tile of up to 4 x 4 outputs then keeps its sums in vector registers.
//
// x is quantized per row by its largest magnitude. VNNI multiplies bytes: x has 8 bits. Without it int8 would have to
// be multiplied as int16 anyway (vpmaddubsw saturates), so x keeps as many bits as the int32 sums hold: 16 up to K =
// 511, 14 at K = 2047. Integer sums are exact and never saturate on either path, so a row's result does not depend on
// other rows.
//
// Faster products of bytes, by AVX-512 and AMX, are in `packed.cpp`.

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "rows.h"

namespace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int kVectorBytes = 64;
#else
constexpr int kVectorBytes = 32;
#endif
constexpr int kBlockBytes = 1536;  // of one row of a block of K
constexpr int kPanel = 16;         // weight rows; a widened panel takes half of L1

template <class T>
struct VectorOf {
    typedef T type __attribute__((vector_size(kVectorBytes)));
};
using Ints = VectorOf<int32_t>::type;

// The way to multiply weights: widened to Element, summed in vectors of int32.

#if defined(__AVXVNNI__) && !defined(__AVX512F__)
struct Int8 {
    using Element = uint8_t;  // w + 128, and x as int8
    static constexpr int kTile = 2;
    static constexpr const char* kSuffix = "-vnni";
    static constexpr int kOffset = 128;
    static int32_t limit(int64_t) { return 127; }
    static void widen(const int8_t* from, uint8_t* to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = uint8_t(from[i]) ^ 0x80;
    }
    static Ints step(Ints sum, VectorOf<uint8_t>::type x, VectorOf<uint8_t>::type w) {
        return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
    }
};
#else
struct Int8 {
    using Element = int16_t;
    static constexpr int kTile = kVectorBytes == 64 ? 4 : 2;
    static constexpr const char* kSuffix = "-int16";
    static constexpr int kOffset = 0;
    static int32_t limit(int64_t k) {
        const int64_t most = INT32_MAX / (128 * (k + 1));
        return int32_t(most < INT16_MAX ? most : INT16_MAX);
    }
    static void widen(const int8_t* from, int16_t* to, int64_t count) {
        for (int64_t i = 0; i < count; ++i) to[i] = from[i];
    }
    static Ints step(Ints sum, VectorOf<int16_t>::type x, VectorOf<int16_t>::type w) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        return sum + (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
        return sum + (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#else
        const Ints xs = (Ints)x, ws = (Ints)w;  // pairs of int16
        return sum + (xs >> 16) * (ws >> 16) + ((xs << 16) >> 16) * ((ws << 16) >> 16);
#endif
    }
};
#endif

// to[i] (+)= the sum of the lanes of v[i], for four vectors. Lanes are added in the same order for each.

#if defined(__AVX2__)
#if defined(__AVX512F__) && defined(__AVX512BW__)
inline __m256i half(Ints v) {
    return _mm256_add_epi32(_mm512_castsi512_si256((__m512i)v), _mm512_extracti64x4_epi64((__m512i)v, 1));
}
#else
inline __m256i half(Ints v) { return (__m256i)v; }
#endif
inline void add_totals(const Ints* v, int32_t* to, bool first) {
    const __m256i a = _mm256_hadd_epi32(half(v[0]), half(v[1])), b = _mm256_hadd_epi32(half(v[2]), half(v[3]));
    const __m256i s = _mm256_hadd_epi32(a, b);
    const __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    _mm_storeu_si128((__m128i*)to, first ? t : _mm_add_epi32(_mm_loadu_si128((const __m128i*)to), t));
}
#else
inline void add_totals(const Ints* v, int32_t* to, bool first) {
    for (int i = 0; i < 4; ++i) {
        int32_t total = v[i][0];
        for (int lane = 1; lane < int(sizeof(Ints) / 4); ++lane) total += v[i][lane];
        to[i] = first ? total : to[i] + total;
    }
}
#endif

thread_local Scratch x_scratch, panel_scratch, sums_scratch;

struct Gemm {
    using Element = Int8::Element;
    using Operand = VectorOf<Element>::type;
    static constexpr int64_t kLanes = kVectorBytes / sizeof(Element);
    static constexpr int64_t kBlock = kBlockBytes / sizeof(Element);

    // One load per operand: otherwise the compiler repeats it inside every multiplication.
    static Operand load(const Element* from) {
        Operand loaded = *(const Operand*)from;
#if defined(__AVX2__)
        asm("" : "+x"(loaded));
#endif
        return loaded;
    }

    // Row m of block b of the packed x begins at b * kBlock * rows + m * width(k, b).
    static int64_t width(int64_t k, int64_t start) {
        return k - start >= kBlock ? kBlock : round_up(k - start, kLanes);
    }

    template <int MR, int NR>
    static void tile(const Element* x, int64_t width, const Element* w, int32_t* sums, bool first) {
        Ints sum[MR][NR] = {};
        for (int64_t k = 0; k < width; k += kLanes) {
            Operand xs[MR];
#pragma GCC unroll 8
            for (int m = 0; m < MR; ++m) xs[m] = load(x + m * width + k);
#pragma GCC unroll 8
            for (int n = 0; n < NR; ++n) {
                const Operand ws = load(w + n * kBlock + k);
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) sum[m][n] = Int8::step(sum[m][n], xs[m], ws);
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
            for (int n = 0; n < NR; n += 4) add_totals(&sum[m][n], sums + m * kPanel + n, first);
    }

    template <int MR>
    static void tiles(const Element* x, int64_t width, const Element* w, int64_t rows, int32_t* sums, bool first) {
        constexpr int NR = MR == 1 ? 8 : 4;
        for (int64_t n = 0; n < rows; n += NR) tile<MR, NR>(x, width, w + n * kBlock, sums + n, first);
    }

    static void tiles(int64_t mr, const Element* x, int64_t width, const Element* w, int64_t rows, int32_t* sums, bool first) {
        switch (mr) {
            case 1: return tiles<1>(x, width, w, rows, sums, first);
            case 2: return tiles<2>(x, width, w, rows, sums, first);
            case 3: return tiles<3>(x, width, w, rows, sums, first);
            default: return tiles<4>(x, width, w, rows, sums, first);
        }
    }

    // One panel of weight rows, widened. Rows behind the last tile's, and the end of the last vector, are zero.
    static void widen_panel(const int8_t* w, int64_t n, int64_t k, int64_t start, int64_t rows, Element* panel) {
        const int64_t count = k - start < kBlock ? k - start : kBlock, padded = width(k, start);
        for (int64_t row = 0; row < rows; ++row) {
            Element* to = panel + row * kBlock;
            const int64_t filled = row < n ? count : 0;
            if (filled) Int8::widen(w + row * k + start, to, filled);
            std::memset((void*)(to + filled), 0, (padded - filled) * sizeof(Element));
        }
    }

    // finish(m, first n, number of n, sums) writes outputs.
    template <class Finish>
    static void run(const Element* x, const int8_t* w, int64_t num_m, int64_t num_n, int64_t k, Finish finish) {
        Element* panel = panel_scratch.get<Element>(kPanel * kBlock);
        int32_t* sums = sums_scratch.get<int32_t>(num_m * kPanel);
        const int64_t num_tiles = (num_m + Int8::kTile - 1) / Int8::kTile;
        // The next panel is prefetched while a panel is multiplied, some lines before each tile.
        const int64_t num_steps = num_tiles * ((k + kBlock - 1) / kBlock);
        const char* const end = (const char*)(w + num_n * k);
        const int64_t ahead_step = round_up(kPanel * k / num_steps + 1, 64);
        for (int64_t n = 0; n < num_n; n += kPanel) {
            const int64_t rows = num_n - n < kPanel ? num_n - n : kPanel;
            const int64_t padded_rows = round_up(rows, num_m == 1 ? 8 : 4);
            const char* ahead = (const char*)(w + (n + kPanel) * k);
            for (int64_t start = 0; start < k; start += kBlock) {
                const int64_t wide = width(k, start);
                widen_panel(w + n * k, rows, k, start, padded_rows, panel);
                for (int64_t t = 0; t < num_tiles; ++t) {
                    const char* const until = ahead + ahead_step < end ? ahead + ahead_step : end;
                    for (; ahead < until; ahead += 64) __builtin_prefetch(ahead, 0, 2);
                    const int64_t m = num_m * t / num_tiles, mr = num_m * (t + 1) / num_tiles - m;
                    const Element* x_tile = x + start * num_m + m * wide;
                    tiles(mr, x_tile, wide, panel, padded_rows, sums + m * kPanel, start == 0);
                }
            }
            for (int64_t m = 0; m < num_m; ++m) {
                // The usual number is a constant: its loops become a few vector instructions.
                if (rows == kPanel) finish(m, n, kPanel, sums + m * kPanel);
                else finish(m, n, rows, sums + m * kPanel);
            }
        }
    }

    // x as blocks of K; convert(row, first k, count, to) writes one row of a block.
    template <class Convert>
    static Element* pack(int64_t num_m, int64_t k, Convert convert) {
        Element* packed = x_scratch.get<Element>(num_m * round_up(k, kLanes));
        for (int64_t start = 0; start < k; start += kBlock) {
            const int64_t count = k - start < kBlock ? k - start : kBlock, wide = width(k, start);
            for (int64_t m = 0; m < num_m; ++m) {
                Element* to = packed + start * num_m + m * wide;
                convert(m, start, count, to);
                std::memset((void*)(to + count), 0, (wide - count) * sizeof(Element));
            }
        }
        return packed;
    }
};

// Multiplies tiles with all operands in L1. Returns the number of multiplications.
int64_t peak(int64_t count) {
    using G = Gemm;
    auto* x = x_scratch.get<G::Element>(4 * G::kBlock);
    auto* w = panel_scratch.get<G::Element>(4 * G::kBlock);
    auto* sums = sums_scratch.get<int32_t>(4 * kPanel);
    std::memset((void*)x, 0, 4 * kBlockBytes);
    std::memset((void*)w, 0, 4 * kBlockBytes);
    for (int64_t i = 0; i < count; ++i) G::tiles<Int8::kTile>(x, G::kBlock, w, 4, sums, true);
    return count * Int8::kTile * 4 * G::kBlock;
}

// Returns float8_e4m3fn of |value| <= 448, nearest even. Adding a power of two 2^20 above it (2^14 for subnormals)
// rounds a magnitude to its 3 bits of mantissa, which then are the lowest bits of the sum.
inline int32_t to_float8(float value) {
    int32_t bits, sum_bits;
    std::memcpy(&bits, &value, 4);
    const int32_t exponent = (bits & 0x7f800000) > (121 << 23) ? bits & 0x7f800000 : 121 << 23;
    const int32_t magic_bits = exponent + (20 << 23);
    float magic;
    std::memcpy(&magic, &magic_bits, 4);
    const float sum = std::fabs(value) + magic;
    std::memcpy(&sum_bits, &sum, 4);
    const int32_t code = (sum_bits - magic_bits) + (exponent >> 20) - (121 << 3);
    return code | ((bits >> 24) & 0x80);
}

template <class Q, class Round>
int64_t quantize(
    const float* w, int64_t stride, int64_t num_rows, int64_t k, float most, Q* values, float* scales, Round round) {
    const float inverse_most = quotient(1.0, most);
    for (int64_t row = 0; row < num_rows; ++row, w += stride, values += k) {
        const float largest = absmax(w, k, kLeast);
        if (largest != largest) return row;
        const float inverse = quotient(most, largest);
        for (int64_t i = 0; i < k; ++i) values[i] = round(w[i] * inverse);
        scales[row] = largest * inverse_most;
    }
    return -1;
}

}  // namespace

extern "C" {

// The instructions that it was compiled for, and the kind of int8 multiplication.
const char* instructions() {
#if defined(__AVX2__) && defined(__FMA__)
    return kVectorBytes == 64 ? "avx512" : "avx2";
#else
    return "generic";
#endif
}
const char* suffix_int8() { return Int8::kSuffix; }

int64_t linear_int8_peak(int64_t count) { return peak(count); }

void linear_int8(
    const float* x, const int8_t* w, const float* scales, const float* bias, float* y, int64_t num_m, int64_t num_n,
    int64_t k, int accumulate) {
    using G = Gemm;
    RowScale scale[kChunk];
    int32_t offset[kChunk];
    for (int64_t first = 0; first < num_m; first += kChunk, x += kChunk * k, y += kChunk * num_n) {
        const int64_t chunk = num_m - first < kChunk ? num_m - first : kChunk;
        for (int64_t m = 0; m < chunk; ++m) scale[m] = RowScale(x + m * k, k, Int8::limit(k)), offset[m] = 0;
        const auto* packed = G::pack(chunk, k, [&](int64_t m, int64_t start, int64_t count, auto* to) {
            const float* row = x + m * k + start;
            int32_t sum = 0;
            for (int64_t i = 0; i < count; ++i) {
                const int32_t q = to_int(row[i] * scale[m].inverse);
                to[i] = G::Element(q);
                sum += q;
            }
            offset[m] += sum * Int8::kOffset;
        });
        G::run(packed, w, chunk, num_n, k, [&](int64_t m, int64_t n, int64_t rows, const int32_t* sums) __attribute__((always_inline)) {
            float values[kPanel];
            for (int64_t i = 0; i < rows; ++i) values[i] = float(sums[i] - offset[m]) * (scale[m].scale * scales[n + i]);
            write(y + m * num_n + n, bias ? bias + n : nullptr, rows, accumulate, values);
        });
    }
}

// Both return the first row with a non-finite value, or -1.

int64_t quantize_int8(
    const float* w, int64_t stride, int64_t n, int64_t k, int8_t* values, float* scales) {
    return quantize(w, stride, n, k, 127.0f, values, scales, [](float v) { return int8_t(to_int(v)); });
}

int64_t quantize_float8_e4m3fn(
    const float* w, int64_t stride, int64_t n, int64_t k, uint8_t* values, float* scales) {
    return quantize(w, stride, n, k, 448.0f, values, scales, [](float v) { return uint8_t(to_float8(v)); });
}
}
