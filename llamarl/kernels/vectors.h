// Vectors of floats for the kernels: GCC's vector types, as wide as `-march=native` has them.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// The instructions that a file was compiled for.
#if defined(__AVX512F__)
#define LLAMARL_INSTRUCTIONS "avx512"
#elif defined(__AVX2__) && defined(__FMA__)
#define LLAMARL_INSTRUCTIONS "avx2"
#elif defined(__ARM_NEON)
#define LLAMARL_INSTRUCTIONS "neon"
#else
#define LLAMARL_INSTRUCTIONS "generic"
#endif

namespace {

#if defined(LLAMARL_LANES)
constexpr int kLanes = LLAMARL_LANES;  // tests compile the code of other processors
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;  // AVX, or two registers of NEON
#endif

template <int lanes>
struct Vector {
    typedef float Floats __attribute__((vector_size(lanes * 4)));
    typedef int32_t Ints __attribute__((vector_size(lanes * 4)));
    typedef uint32_t Bits __attribute__((vector_size(lanes * 4)));
    typedef uint16_t Halves __attribute__((vector_size(lanes * 2)));
};

template <class T>
inline T load(const void* from) {
    T loaded;
    std::memcpy(&loaded, from, sizeof(T));
    return loaded;
}

template <int lanes>
inline typename Vector<lanes>::Floats widen(const float* from) {
    return load<typename Vector<lanes>::Floats>(from);
}

template <int lanes>
inline typename Vector<lanes>::Floats widen(const uint16_t* from) {
    using Bits = typename Vector<lanes>::Bits;
    const auto halves = load<typename Vector<lanes>::Halves>(from);
    // GCC 12 compiles the general conversion to four instructions.
#if defined(__AVX512F__)
    if constexpr (lanes == 16) return (typename Vector<lanes>::Floats)((Bits)_mm512_cvtepu16_epi32((__m256i)halves) << 16);
#endif
#if defined(__AVX2__)
    if constexpr (lanes == 8) return (typename Vector<lanes>::Floats)((Bits)_mm256_cvtepu16_epi32((__m128i)halves) << 16);
#endif
    return (typename Vector<lanes>::Floats)(__builtin_convertvector(halves, Bits) << 16);
}

inline void narrow(float from, float* to) { *to = from; }

// Converts to bfloat16, nearest even. NaN stays NaN.
inline void narrow(float from, uint16_t* to) {
    const uint32_t bits = load<uint32_t>(&from);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *to = uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

using Floats = Vector<kLanes>::Floats;
using Ints = Vector<kLanes>::Ints;

// Returns e^x for x <= 0; 0 below -87, NaN for NaN. The error is at most 3e-7 with fused multiply-adds, else 4e-6, and
// 1e-6 above -20. Reduction and polynomial: Cephes, expf.
inline Floats exp_of_negative(Floats x) {
    const Floats least = Floats{} - 87.0f;
    const Floats bounded = x < least ? least : x;
    const Ints n = __builtin_convertvector(bounded * 1.44269504f - 0.5f, Ints);
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = bounded - whole * 0.693359375f - whole * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const Floats result = p * (Floats)((n + 127) << 23);
    return x < least ? Floats{} : result;
}

// Reduces all lanes to one number by joining halves, in a few instructions instead of one per lane.
template <int lanes = kLanes, class Join>
inline float joined(typename Vector<lanes>::Floats v, Join join) {
    if constexpr (lanes == 2) {
        return join(v[0], v[1]);
    } else {
        typename Vector<lanes / 2>::Floats halves[2];
        std::memcpy(halves, &v, sizeof(v));
        return joined<lanes / 2>(join(halves[0], halves[1]), join);
    }
}

inline float total(Floats v) {
    return joined(v, [](auto a, auto b) { return a + b; });
}

// NaN is ignored, or is the result.
inline float largest(Floats v) {
    return joined(v, [](auto a, auto b) { return a > b ? a : b; });
}

}  // namespace
