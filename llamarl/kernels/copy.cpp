// Copies rows of a tensor, casting on the way, and fingerprints the stored bytes, in one pass over memory.
//
// The fingerprint of a tensor is the sum over its bytes of value * coefficient(position) mod 2^64, where
//   coefficient(p) = block_key(p / 8192) * word_key(p / 4 mod 2048) * 256^(p mod 4),
// a multilinear hash (Carter and Wegman, 1979) in two levels. It is linear: parts of a tensor may be summed in any
// order and by different processes, and the parts' sums add up to the sum of the whole. Keys are odd, so one flipped
// bit always changes it.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t BLOCK_BYTES = 8192, WORD_BYTES = 4;

uint64_t mix(uint64_t x) {  // splitmix64 (Steele, Lea and Flood, 2014)
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

struct Keys {
    alignas(64) uint32_t word[BLOCK_BYTES / WORD_BYTES];
    Keys() {
        for (size_t i = 0; i < BLOCK_BYTES / WORD_BYTES; i++) word[i] = uint32_t(mix(i) >> 32) | 1;
    }
};
const Keys keys;

uint64_t block_key(uint64_t block) { return mix(block ^ 0x5851f42d4c957f2d) | 1; }

// Vectors of words. `multiply` takes the words 0, 2, 4, ...
#if defined(__AVX2__)
struct Lines32 {
    using Type = __m256i;
    static Type load(const void* from) { return _mm256_loadu_si256((const Type*)from); }
    static void store(void* to, Type x) { _mm256_storeu_si256((Type*)to, x); }
    static void stream(void* to, Type x) { _mm256_stream_si256((Type*)to, x); }
    static Type add(Type a, Type b) { return _mm256_add_epi64(a, b); }
    static Type multiply(Type a, Type b) { return _mm256_mul_epu32(a, b); }
    static Type odd_words(Type x) { return _mm256_srli_epi64(x, 32); }
};
#endif
#if defined(__AVX512F__)
struct Lines64 {  // a store fills a cache line
    using Type = __m512i;
    static Type load(const void* from) { return _mm512_loadu_si512(from); }
    static void store(void* to, Type x) { _mm512_storeu_si512(to, x); }
    static void stream(void* to, Type x) { _mm512_stream_si512((Type*)to, x); }
    static Type add(Type a, Type b) { return _mm512_add_epi64(a, b); }
    static Type multiply(Type a, Type b) { return _mm512_maskz_mul_epu32(__mmask8(-1), a, b); }
    static Type odd_words(Type x) { return _mm512_maskz_srli_epi64(__mmask8(-1), x, 32); }
};
#endif

// Stores words of source at target, unless target is null, from `i` on in whole vectors. Adds to `sum`.
struct Words {
    uint8_t* target;
    const uint8_t* source;
    const uint32_t* key;
    uint64_t sum = 0;
    size_t i = 0;

    void one_by_one(size_t end) {
        for (; i < end; i += WORD_BYTES) {
            uint32_t word;
            memcpy(&word, source + i, WORD_BYTES);
            if (target) memcpy(target + i, &word, WORD_BYTES);
            sum += uint64_t(word) * key[i / WORD_BYTES];
        }
    }

#if defined(__AVX2__)
    template <class V, bool two_places, size_t ahead>
    void by_vectors(size_t bytes) {
        using Vector = typename V::Type;
        constexpr size_t WIDE = sizeof(Vector);
        // Stores that bypass the cache need aligned targets. They save reading the overwritten memory.
        if (target) one_by_one(std::min(bytes, size_t(-uintptr_t(target)) % WIDE / WORD_BYTES * WORD_BYTES));
        Vector even = {}, odd = {};
        const bool aligned = uintptr_t(target + i) % WIDE == 0;
        const auto step = [&, to = target, from = source, keys = key](size_t at) __attribute__((always_inline)) {
            _mm_prefetch(reinterpret_cast<const char*>(from + at + ahead), _MM_HINT_T0);
            const Vector x = V::load(from + at);
            if (to) aligned ? V::stream(to + at, x) : V::store(to + at, x);
            const Vector k = V::load(keys + at / WORD_BYTES);
            even = V::add(even, V::multiply(x, k));
            odd = V::add(odd, V::multiply(V::odd_words(x), V::odd_words(k)));
        };
        const size_t half = two_places ? (bytes - i) / 2 / WIDE * WIDE : 0;
        size_t at = i;
        for (const size_t end = i + half; at < end; at += WIDE) {
            step(at);
            step(at + half);
        }
        for (at += half; at + WIDE <= bytes; at += WIDE) step(at);
        i = at;
        uint64_t lanes[WIDE / 8];
        even = V::add(even, odd);
        memcpy(lanes, &even, WIDE);
        for (const uint64_t lane : lanes) sum += lane;
    }
#endif
};

// The fastest variant depends on the processor: vector width, one or two places at once, and prefetch distance.
void (Words::*const ways[])(size_t) = {
#if defined(__AVX2__)
    &Words::by_vectors<Lines32, false, 256>,  &Words::by_vectors<Lines32, false, 512>,
    &Words::by_vectors<Lines32, false, 1024>, &Words::by_vectors<Lines32, true, 4096>,
#else
    &Words::one_by_one,
#endif
#if defined(__AVX512F__)
    &Words::by_vectors<Lines64, false, 256>,  &Words::by_vectors<Lines64, false, 512>,
    &Words::by_vectors<Lines64, false, 2048>, &Words::by_vectors<Lines64, true, 4096>,
#endif
};
int way = 0;

// Returns the sum with one key per word.
uint64_t copy_words(uint8_t* target, const uint8_t* source, const uint32_t* key, size_t bytes) {
    Words words{target, source, key};
    (words.*ways[way])(bytes);
    words.one_by_one(bytes);
    return words.sum;
}

// Returns the sum of bytes that begin or end within a word.
uint64_t copy_bytes(uint8_t* target, const uint8_t* source, uint64_t position, size_t bytes) {
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes; i++) {
        const uint64_t p = position + i;
        if (target) target[i] = source[i];
        sum += (uint64_t(source[i]) << (8 * (p % WORD_BYTES))) * keys.word[p % BLOCK_BYTES / WORD_BYTES];
    }
    return sum;
}

// Copies a piece within one block.
uint64_t copy_piece(uint8_t* target, const uint8_t* source, uint64_t position, size_t bytes) {
    const size_t head = std::min<size_t>(bytes, -position % WORD_BYTES), words = (bytes - head) & ~(WORD_BYTES - 1);
    const uint64_t first = position + head, end = first + words;
    uint64_t sum = head ? copy_bytes(target, source, position, head) : 0;
    if (words) {
        const uint32_t* key = keys.word + first % BLOCK_BYTES / WORD_BYTES;
        sum += copy_words(target ? target + head : nullptr, source + head, key, words);
    }
    const size_t rest = bytes - head - words;
    if (rest) sum += copy_bytes(target ? target + head + words : nullptr, source + head + words, end, rest);
    return sum * block_key(position / BLOCK_BYTES);
}

// Rounds to nearest even. Every NaN becomes the same NaN.
void to_bfloat16(uint16_t* target, const uint8_t* source, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint32_t x;
        memcpy(&x, source + 4 * i, 4);
        const uint32_t rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
        target[i] = (x & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t(rounded);
    }
}

}  // namespace

// The number of variants, and the choice of one. All have the same bytes and sums.
extern "C" int32_t num_ways() { return sizeof(ways) / sizeof(ways[0]); }
extern "C" void use_way(int32_t index) { way = index; }
extern "C" int32_t way_in_use() { return way; }

// Copies rows of `row_bytes` bytes of the target, and returns their part of the fingerprint. `position` is the place of
// the first row in its tensor, in bytes, and `position_stride` the distance of rows there. The target may be a packed
// buffer. With `cast`, source is float32 and target bfloat16. Without target, only the fingerprint is computed.
extern "C" uint64_t copy_rows(uint8_t* target, const uint8_t* source, int64_t rows, int64_t row_bytes,
                              int64_t target_stride, int64_t source_stride, uint64_t position, int64_t position_stride,
                              int32_t cast) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    alignas(64) uint16_t casted[BLOCK_BYTES / 2];
    uint64_t sum = 0;
    for (int64_t row = 0; row < rows; row++) {
        for (size_t done = 0; done < size_t(row_bytes);) {
            const uint64_t at = position + row * position_stride + done;
            const size_t piece = std::min<size_t>(row_bytes - done, BLOCK_BYTES - at % BLOCK_BYTES);
            const uint8_t* from = source + row * source_stride + (cast ? 2 * done : done);
            if (cast) {
                to_bfloat16(casted, from, piece / 2);
                from = reinterpret_cast<const uint8_t*>(casted);
            }
            sum += copy_piece(target ? target + row * target_stride + done : nullptr, from, at, piece);
            done += piece;
        }
    }
#if defined(__AVX2__)
    _mm_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_seq_cst);  // a reader that sees the version word sees the bytes
    return sum;
}
