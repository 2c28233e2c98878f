// The instructions of `packed.cpp` as plain loops, by the manuals' pseudocode. None is inlined: what surrounds a call
// must not change the order of its additions.
#pragma once

#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64)));
typedef long long __m512i __attribute__((vector_size(64)));
typedef short __m512bh __attribute__((vector_size(64)));
typedef uint16_t __mmask16;

#define EMULATED static __attribute__((noinline, unused))
#define _MM_HINT_T1 2

namespace emulated {

// Bfloat16 operands and results: denormals count as zeros.
inline float widen(uint16_t half) {
    const uint32_t bits = half & 0x7f80 ? uint32_t(half) << 16 : uint32_t(half & 0x8000) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
    if (!(bits & 0x7f800000)) return uint16_t((bits & 0x80000000) >> 16);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t half_of(const void* from, int i) { return ((const uint16_t*)from)[i]; }

struct Tile {
    alignas(64) uint8_t bytes[16][64];
};
static thread_local Tile tiles[8];

}  // namespace emulated

EMULATED void _mm_prefetch(const void*, int) {}
EMULATED __m512i _mm512_setzero_si512() { return __m512i{}; }
EMULATED __m512i _mm512_load_si512(const void* from) { return *(const __m512i*)from; }
EMULATED void _mm512_store_si512(void* to, __m512i value) { *(__m512i*)to = value; }

EMULATED __m512i _mm512_set1_epi32(int32_t value) {
    __m512i result;
    for (int i = 0; i < 16; ++i) memcpy((char*)&result + 4 * i, &value, 4);
    return result;
}

EMULATED __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
    __m512 result = {};
    for (int i = 0; i < 16; ++i)
        if (mask >> i & 1) result[i] = from[i];
    return result;
}

EMULATED __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    __m512bh result;
    for (int i = 0; i < 16; ++i) {
        result[i] = short(emulated::narrow(low[i]));
        result[16 + i] = short(emulated::narrow(high[i]));
    }
    return result;
}

EMULATED __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {  // a unsigned, b signed
    for (int i = 0; i < 16; ++i) {
        int32_t value;
        memcpy(&value, (char*)&sum + 4 * i, 4);
        for (int j = 4 * i; j < 4 * i + 4; ++j) value += int32_t(((uint8_t*)&a)[j]) * int32_t(((int8_t*)&b)[j]);
        memcpy((char*)&sum + 4 * i, &value, 4);
    }
    return sum;
}

EMULATED __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
    for (int i = 0; i < 16; ++i)
        for (int j = 2 * i; j < 2 * i + 2; ++j)
            sum[i] += emulated::widen(uint16_t(a[j])) * emulated::widen(uint16_t(b[j]));
    return sum;
}

EMULATED void _tile_loadconfig(const void* config) {
    for (int i = 0; i < 8; ++i)  // all that `packed.cpp` asks for: 16 rows of 64 bytes
        if (((const uint8_t*)config)[48 + i] != 16 || ((const uint16_t*)config)[8 + i] != 64) __builtin_trap();
}
EMULATED void _tile_release() { memset(emulated::tiles, 0xff, sizeof(emulated::tiles)); }
EMULATED void _tile_zero(int tile) { memset(&emulated::tiles[tile], 0, sizeof(emulated::Tile)); }

EMULATED void _tile_loadd(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < 16; ++row) memcpy(emulated::tiles[tile].bytes[row], (const char*)from + row * stride, 64);
}

EMULATED void _tile_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) memcpy((char*)to + row * stride, emulated::tiles[tile].bytes[row], 64);
}

EMULATED void _tile_dpbf16ps(int to, int a, int b) {
    using namespace emulated;
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                float* sum = (float*)tiles[to].bytes[m] + n;
                const void *x = tiles[a].bytes[m], *w = tiles[b].bytes[k];
                *sum += widen(half_of(x, 2 * k)) * widen(half_of(w, 2 * n));
                *sum += widen(half_of(x, 2 * k + 1)) * widen(half_of(w, 2 * n + 1));
            }
}

EMULATED void _tile_dpbsud(int to, int a, int b) {  // a signed, b unsigned
    using namespace emulated;
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n)
                for (int i = 0; i < 4; ++i)
                    ((int32_t*)tiles[to].bytes[m])[n] +=
                        int32_t(((int8_t*)tiles[a].bytes[m])[4 * k + i]) * int32_t(tiles[b].bytes[k][4 * n + i]);
}
