// y[M, N] = x[M, K] w[N, K]^T (+ bias, + y) on one core, with float32 around it, in bfloat16 or int8, by AMX tiles or
// by the dot products of AVX-512. Both read the weights in the same packed order. On some processors a bfloat16 dot
// product is no faster than float32 multiply-adds; there `panels.cpp` multiplies, which is exact in x. Uses no header
// of torch or Python.
//
// Packed weights: panels of 32 rows of w, each contiguous along K in steps of 64 bytes per row:
//   [N/32][K/depth][2][16 words of k][16 rows][one word: 2 bfloat16 or 4 int8], depth = 32 or 64.
// A step of 16 rows is one tile of 1024 bytes; each of its lines is one operand of a dot product of 16 rows. x becomes
// the same kind of tiles, [M/16][K/depth][16 rows][depth]. N, K and M are padded with zeros.
//
// A block of 32 x 32 outputs keeps its sums in registers over all of K, in the same order of additions for every M, so
// a row's bits do not depend on other rows. int8: x has 8 bits per row; w is stored + 128, as vpdpbusd needs it, and
// the epilogue subtracts 128 times the sum of x. Integer sums are exact up to K = 66,000, so both ways have the same
// bits.

#if defined(LLAMARL_EMULATED)
#include "emulated.h"  // tests: the same instructions as plain loops
#else
#include <immintrin.h>
#endif
#include <type_traits>

#include "rows.h"

#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define LLAMARL_TILES
#endif
#if defined(LLAMARL_TILES) && !defined(LLAMARL_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t kTileBytes = 1024, kPanel = 32;
thread_local Scratch x_scratch;

struct Bf16 {
    using Element = uint16_t;
    using Sum = float;
    static constexpr int64_t kDepth = 32;
};
struct Int8 {
    using Element = int8_t;
    using Sum = int32_t;
    static constexpr int64_t kDepth = 64;
};

template <class T>
int64_t steps_of(int64_t k) {
    return (k + T::kDepth - 1) / T::kDepth;
}

inline void fetch(const char*& ahead, int64_t bytes) {
    for (const char* until = ahead + bytes; ahead < until; ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
}

// The ways to multiply: block<T>(a, steps, rows, b, ahead, step_bytes, c) stores the sums of 32 x 32 outputs, of which
// `rows` are valid. The next panel is prefetched while one is multiplied, `fetch_bytes` of it per block.

#if defined(__AVX512VNNI__)
struct Avx512 {
    static constexpr int64_t kRows = 8;

    static __m512i product(__m512i sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
#if defined(__AVX512BF16__)
    static __m512 product(__m512 sum, __m512i w, __m512i x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
    }
#endif

    template <int MR, class Sum>
    static void rows(const char* a, int64_t steps, const char* b, const char*& ahead, int64_t fetch_bytes, Sum* c) {
        std::conditional_t<std::is_same_v<Sum, float>, __m512, __m512i> sum[MR][2] = {};
        for (int64_t s = 0; s < steps; ++s, a += kTileBytes, b += 2 * kTileBytes) {
            fetch(ahead, fetch_bytes);
            for (int64_t word = 0; word < 16; ++word) {
                const __m512i w0 = _mm512_load_si512(b + 64 * word), w1 = _mm512_load_si512(b + kTileBytes + 64 * word);
#pragma GCC unroll 8
                for (int m = 0; m < MR; ++m) {
                    int32_t pair;
                    std::memcpy(&pair, a + 64 * m + 4 * word, 4);
                    const __m512i x = _mm512_set1_epi32(pair);
                    sum[m][0] = product(sum[m][0], w0, x);
                    sum[m][1] = product(sum[m][1], w1, x);
                }
            }
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m) std::memcpy(c + kPanel * m, &sum[m], sizeof(sum[m]));
    }

    template <class T>
    static void block(
        const char* a, int64_t steps, int64_t num_rows, const char* b, const char* ahead, int64_t fetch_bytes,
        typename T::Sum* c) {
        fetch_bytes = round_up(fetch_bytes / (steps * ((num_rows + kRows - 1) / kRows)), 64);
        for (int64_t m = 0; m < num_rows; m += kRows, c += kRows * kPanel) {
            const char* x = a + m / 16 * steps * kTileBytes + m % 16 * 64;
            const int64_t left = num_rows - m;
            if (left > 4) rows<8>(x, steps, b, ahead, fetch_bytes, c);
            else if (left > 2) rows<4>(x, steps, b, ahead, fetch_bytes, c);
            else if (left > 1) rows<2>(x, steps, b, ahead, fetch_bytes, c);
            else rows<1>(x, steps, b, ahead, fetch_bytes, c);
        }
    }
    static void begin() {}
    static void end() {}
};
#endif

#if defined(LLAMARL_TILES)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
    TileConfig() {
        for (int i = 0; i < 8; ++i) bytes_per_row[i] = 64, rows[i] = 16;
    }
};
const TileConfig tile_config;

struct Amx {
    // Registers 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights. GCC needs their numbers as literals.
    static void product(Bf16, bool second) {
        if (second) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    }
    static void product(Int8, bool second) {
        if (second) {
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        } else {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
        }
    }

    template <class T>
    static void block(
        const char* a, int64_t steps, int64_t num_rows, const char* b, const char* ahead, int64_t fetch_bytes,
        typename T::Sum* c) {
        const bool two = num_rows > 16;
        const char* a2 = a + steps * kTileBytes;
        fetch_bytes = round_up(fetch_bytes / steps, 64);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t s = 0; s < steps; ++s, a += kTileBytes, a2 += kTileBytes, b += 2 * kTileBytes) {
            fetch(ahead, fetch_bytes);
            _tile_loadd(6, b, 64);
            _tile_loadd(4, a, 64);
            _tile_loadd(7, b + kTileBytes, 64);
            product(T(), false);
            if (two) {
                _tile_loadd(5, a2, 64);
                product(T(), true);
            }
        }
        _tile_stored(0, c, 128);
        _tile_stored(1, c + 16, 128);
        if (two) {
            _tile_stored(2, c + 16 * kPanel, 128);
            _tile_stored(3, c + 16 * kPanel + 16, 128);
        }
    }
    // Other code in this process may configure tiles. Released tiles make thread switches cheap.
    static void begin() { _tile_loadconfig(&tile_config); }
    static void end() { _tile_release(); }
};
#endif

// finish(row, first n, sums of 32 n) writes outputs.
template <class Way, class T, class Finish>
void run(const char* x, const char* w, int64_t num_m, int64_t num_n, int64_t k, Finish finish) {
    alignas(64) typename T::Sum c[32 * kPanel];
    const int64_t steps = steps_of<T>(k), panel = steps * 2 * kTileBytes, num_blocks = (num_m + 31) / 32;
    Way::begin();
    for (int64_t n = 0; n < num_n; n += kPanel, w += panel)
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t rows = num_m - 32 * block < 32 ? num_m - 32 * block : 32, part = panel / num_blocks;
            // Prefetching past the end is harmless.
            Way::template block<T>(x + block * panel, steps, rows, w, w + panel + block * part, part, c);
            for (int64_t m = 0; m < rows; ++m) finish(32 * block + m, n, c + kPanel * m);
        }
    Way::end();
}

// Tiles of x; convert(row, first k, count, to) writes one line.
template <class T, class Convert>
char* pack_x(int64_t num_m, int64_t k, Convert convert) {
    const int64_t steps = steps_of<T>(k);
    char* packed = x_scratch.get<char>(round_up(num_m, 32) / 16 * steps * kTileBytes);
    for (int64_t m = 0; m < round_up(num_m, 16); ++m)
        for (int64_t s = 0; s < steps; ++s) {
            char* to = packed + (m / 16 * steps + s) * kTileBytes + m % 16 * 64;
            const int64_t left = k - s * T::kDepth, count = m >= num_m ? 0 : left < T::kDepth ? left : T::kDepth;
            // The usual number as a constant: its loops become a few vector instructions.
            if (count == T::kDepth) {
                convert(m, s * T::kDepth, T::kDepth, (typename T::Element*)to);
                continue;
            }
            std::memset(to, 0, 64);
            if (count) convert(m, s * T::kDepth, count, (typename T::Element*)to);
        }
    return packed;
}

template <class T>
void pack_w(const typename T::Element* w, int64_t num_n, int64_t k, char* out, uint32_t flip) {
    constexpr int64_t kGroup = T::kDepth / 16;
    const int64_t steps = steps_of<T>(k);
    for (int64_t n = 0; n < num_n; n += 16) {
        const int64_t rows = num_n - n < 16 ? num_n - n : 16;
        for (int64_t s = 0; s < steps; ++s) {
            auto* to = (uint32_t*)(out + ((n / kPanel * steps + s) * 2 + n / 16 % 2) * kTileBytes);
            const int64_t left = k - s * T::kDepth;
            if (rows == 16 && left >= T::kDepth) {  // transposes 16 x 16 words
                for (int64_t row = 0; row < 16; ++row)
                    for (int64_t word = 0; word < 16; ++word) {
                        uint32_t value;
                        std::memcpy(&value, w + (n + row) * k + s * T::kDepth + word * kGroup, 4);
                        to[16 * word + row] = value ^ flip;
                    }
                continue;
            }
            for (int64_t i = 0; i < 256; ++i) to[i] = 0;
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t word = 0; word * kGroup < left && word < 16; ++word) {
                    uint32_t value = 0;
                    const int64_t there = left - word * kGroup < kGroup ? left - word * kGroup : kGroup;
                    std::memcpy(&value, w + (n + row) * k + s * T::kDepth + word * kGroup, there * 4 / kGroup);
                    to[16 * word + row] = value ^ flip;
                }
        }
        if (n + 16 >= num_n && n / 16 % 2 == 0)  // the panel's other half
            for (int64_t s = 0; s < steps; ++s)
                std::memset(out + ((n / kPanel * steps + s) * 2 + 1) * kTileBytes, 0, kTileBytes);
    }
}

#if defined(__AVX512BF16__)
// Rounds to nearest even. NaN stays NaN, denormals become zeros.
inline void to_bfloat16(const float* from, int64_t count, uint16_t* to) {
    const auto mask = [&](int64_t first) { return __mmask16(count - first >= 16 ? 0xffff : count <= first ? 0 : (1 << (count - first)) - 1); };
    const __m512 low = _mm512_maskz_loadu_ps(mask(0), from), high = _mm512_maskz_loadu_ps(mask(16), from + 16);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <class Way>
void linear_bfloat16(
    const float* x, const char* w, const float* bias, float* y, int64_t num_m, int64_t num_n, int64_t k,
    int accumulate) {
    for (int64_t first = 0; first < num_m; first += kChunk, x += kChunk * k, y += kChunk * num_n) {
        const int64_t chunk = num_m - first < kChunk ? num_m - first : kChunk;
        const char* packed = pack_x<Bf16>(chunk, k, [&](int64_t m, int64_t start, int64_t count, uint16_t* to) {
            to_bfloat16(x + m * k + start, count, to);
        });
        run<Way, Bf16>(packed, w, chunk, num_n, k, [&](int64_t m, int64_t n, const float* sums) __attribute__((always_inline)) {
            write_panel<kPanel>(y + m * num_n + n, bias ? bias + n : nullptr, num_n - n, accumulate, sums);
        });
    }
}
#endif

template <class Way>
void linear_int8(
    const float* x, const char* w, const float* scales, const float* bias, float* y, int64_t num_m, int64_t num_n,
    int64_t k, int accumulate) {
    RowScale row[kChunk];
    int32_t offset[kChunk];
    for (int64_t first = 0; first < num_m; first += kChunk, x += kChunk * k, y += kChunk * num_n) {
        const int64_t chunk = num_m - first < kChunk ? num_m - first : kChunk;
        for (int64_t m = 0; m < chunk; ++m) row[m] = RowScale(x + m * k, k, 127), offset[m] = 0;
        const char* packed = pack_x<Int8>(chunk, k, [&](int64_t m, int64_t start, int64_t count, int8_t* to) __attribute__((always_inline)) {
            int32_t sum = 0;
            for (int64_t i = 0; i < count; ++i) {
                const int32_t q = to_int(x[m * k + start + i] * row[m].inverse);
                to[i] = int8_t(q);
                sum += q;
            }
            offset[m] += 128 * sum;
        });
        run<Way, Int8>(packed, w, chunk, num_n, k, [&](int64_t m, int64_t n, const int32_t* sums) __attribute__((always_inline)) {
            const float* add = bias ? bias + n : nullptr;
            float values[kPanel];
            const auto finish = [&](int64_t count) __attribute__((always_inline)) {
                for (int64_t i = 0; i < count; ++i) values[i] = float(sums[i] - offset[m]) * (row[m].scale * scales[n + i]);
                write(y + m * num_n + n, add, count, accumulate, values);
            };
            if (num_n - n >= kPanel) finish(kPanel);
            else finish(num_n - n);
        });
    }
}

// Multiplies blocks of 32 rows with all operands in L1. Returns the number of multiplications.
template <class Way, class T>
int64_t peak(int64_t count) {
    thread_local Scratch w_scratch;
    constexpr int64_t kSteps = 6, kBytes = kSteps * 2 * kTileBytes;
    char *x = x_scratch.get<char>(kBytes), *w = w_scratch.get<char>(kBytes);
    alignas(64) typename T::Sum c[32 * kPanel];
    std::memset(x, 0, kBytes);
    std::memset(w, 0, kBytes);
    Way::begin();
    for (int64_t i = 0; i < count; ++i) Way::template block<T>(x, kSteps, 32, w, w, 0, c);
    Way::end();
    return count * 32 * kPanel * kSteps * T::kDepth;
}

}  // namespace

// A function is missing if its instructions are.
extern "C" {

#define LLAMARL_PACK(kind, Kind, T, flip)                                                                              \
    void pack_##kind(const T* w, int64_t n, int64_t k, char* out) { pack_w<Kind>(w, n, k, out, flip); }                \
    int64_t packed_bytes_##kind(int64_t n, int64_t k) {                                                                \
        return round_up(n, kPanel) / kPanel * steps_of<Kind>(k) * 2 * kTileBytes;                                      \
    }
#define LLAMARL_LINEAR_INT8(name, Way)                                                                                 \
    int64_t name##_peak(int64_t count) { return peak<Way, Int8>(count); }                                              \
    void name(                                                                                                        \
        const float* x, const char* w, const float* scales, const float* bias, float* y, int64_t m, int64_t n,         \
        int64_t k, int accumulate) {                                                                                   \
        linear_int8<Way>(x, w, scales, bias, y, m, n, k, accumulate);                                                  \
    }

#define LLAMARL_LINEAR_BFLOAT16(name, Way)                                                                             \
    int64_t name##_peak(int64_t count) { return peak<Way, Bf16>(count); }                                              \
    void name(                                                                                                        \
        const float* x, const char* w, const float* bias, float* y, int64_t m, int64_t n, int64_t k, int accumulate) { \
        linear_bfloat16<Way>(x, w, bias, y, m, n, k, accumulate);                                                      \
    }

#if defined(__AVX512VNNI__)
LLAMARL_PACK(int8, Int8, int8_t, 0x80808080)
LLAMARL_LINEAR_INT8(avx512_int8, Avx512)
#endif
#if defined(__AVX512BF16__)
LLAMARL_PACK(bfloat16, Bf16, uint16_t, 0)
#if defined(__AVX512VNNI__)
LLAMARL_LINEAR_BFLOAT16(avx512_bfloat16, Avx512)
#endif
#endif
#if defined(LLAMARL_TILES)
LLAMARL_LINEAR_INT8(amx_int8, Amx)
LLAMARL_LINEAR_BFLOAT16(amx_bfloat16, Amx)

// Asks Linux for the state of tiles, once per process, before the first tile. Returns 0, or -1 if Linux refuses.
int amx_enable() {
#if defined(LLAMARL_EMULATED)
    return 0;
#else
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? -1 : 0;
#endif
}
#endif
}
