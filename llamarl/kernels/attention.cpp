// Attention to a KV cache in blocks, on one core: stores the keys and values of packed tokens, then computes the
// attention of the queries to the runs in their tasks. Uses no header of torch or Python.
//
// A task is a run of blocks and the tokens ("members") that see it: the own tokens of a decoding rollout, the shared
// prompt of a group's rollouts, the tokens before a prefill chunk. Up to 6 queries go through a run together, 256 keys
// at a time: scores, exponentials, sums of values. The state of a query, maximum, sum of weights and weighted values,
// is kept between runs (online softmax, arXiv 1805.02867, algorithm 3).
//
// Keys are [K][16] in a block: a vector holds one channel of neighboring tokens, so scores need no sum over lanes.
// Values are [16][K]. An output has the same operations for any other queries in its tile, and memory behind the last
// token of a run does not affect it.

#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kBlock = 16;   // tokens
constexpr int kChunk = 256;  // tokens whose scores are in memory at once
constexpr int kTile = 6;     // queries: with two vectors each, 12 sums of 16 registers

struct Task {
    int64_t first_member, num_members;
    int64_t first_block;
    int64_t num_tokens;  // seen by the first member
    int64_t step;        // more for each next member
};

struct Query {
    const float* q;
    float* out;
    float* state;   // maximum, sum
    int64_t count;  // tokens of the chunk that the query sees
};

// Keys and values of one kv head, up to 256 tokens.
template <class T>
struct Run {
    const T *keys, *values;  // of the head in block 0
    int64_t stride;          // to the next block
    const int64_t* blocks;
    int64_t num_blocks;

    const T* in(const T* base, int64_t block) const {
        return base + blocks[block < num_blocks ? block : num_blocks - 1] * stride;
    }
};

template <class T, int Q>
struct Tile {
    Query query[Q];
    Run<T> run, next;  // `next` is prefetched: blocks are apart, and the processor cannot guess
    int64_t head_dim;
    alignas(64) float scores[Q][kChunk + 8 * kLanes];
    float decay[Q];

    // scores = q . k, unscaled, for at least `count` tokens from block `first` on.
    template <int num_vectors>
    void multiply_keys(int64_t count, int64_t first) {
        constexpr int num_blocks = num_vectors * kLanes / kBlock;
        constexpr bool can_halve = num_vectors > 1 && num_vectors * kLanes / 2 % kBlock == 0;
        for (; first * kBlock < count; first += num_blocks) {
            if constexpr (can_halve)
                if (count - first * kBlock <= num_vectors * kLanes / 2) return multiply_keys<num_vectors / 2>(count, first);
            const T *from[num_blocks], *ahead[num_blocks];
            for (int b = 0; b < num_blocks; ++b) {
                from[b] = run.in(run.keys, first + b);
                ahead[b] = next.in(next.keys, first + b);
            }
            Floats sum[Q][num_vectors] = {};
            for (int64_t d = 0; d < head_dim; ++d) {
                Floats k[num_vectors];
#pragma GCC unroll 8
                for (int b = 0; b < num_blocks; ++b) __builtin_prefetch(ahead[b] + d * kBlock, 0, 2);
#pragma GCC unroll 8
                for (int v = 0; v < num_vectors; ++v)
                    k[v] = widen<kLanes>(from[v * kLanes / kBlock] + d * kBlock + v * kLanes % kBlock);
#pragma GCC unroll 8
                for (int i = 0; i < Q; ++i) {
                    const float q = query[i].q[d];
#pragma GCC unroll 8
                    for (int v = 0; v < num_vectors; ++v) sum[i][v] += q * k[v];
                }
            }
            for (int i = 0; i < Q; ++i) std::memcpy(scores[i] + first * kBlock, sum[i], sizeof(sum[i]));
        }
    }

    // Turns scores into weights relative to the largest score so far, 0 for keys that a query does not see.
    void exponentiate(float scale, int64_t padded) {
        for (int i = 0; i < Q; ++i) {
            float* s = scores[i];
            const int64_t count = query[i].count;
            decay[i] = 1.0f;
            if (count <= 0) {
                std::memset(s, 0, padded * sizeof(float));
                continue;
            }
            for (int64_t t = count; t < padded; ++t) s[t] = -INFINITY;
            Floats most = load<Floats>(s);
            for (int64_t t = kLanes; t < padded; t += kLanes) {
                const Floats v = load<Floats>(s + t);
                most = v > most ? v : most;
            }
            float* state = query[i].state;
            const float before = state[0];
            const float here = largest(most), now = here > before ? here : before;
            Floats sum = {};
            for (int64_t t = 0; t < padded; t += kLanes) {
                const Floats p = exp_of_negative((load<Floats>(s + t) - now) * scale);
                std::memcpy(s + t, &p, sizeof(p));
                sum += p;
            }
            decay[i] = exp_of_negative(Floats{} + (before - now) * scale)[0];
            state[0] = now;
            state[1] = state[1] * decay[i] + total(sum);
        }
    }

    // out = out * decay + weights . values, from channel `d` on: first as many channels as fill multiples of
    // `num_vectors`, then the rest.
    template <int lanes, int num_vectors>
    void add_values(int64_t count, int64_t d) {
        using Lanes = typename Vector<lanes>::Floats;
        for (; d + num_vectors * lanes <= head_dim; d += num_vectors * lanes) {
            Lanes sum[Q][num_vectors];
            for (int i = 0; i < Q; ++i)
                for (int v = 0; v < num_vectors; ++v) sum[i][v] = load<Lanes>(query[i].out + d + v * lanes) * decay[i];
            for (int64_t start = 0; start < count; start += kBlock) {
                const T *from = run.in(run.values, start / kBlock) + d, *ahead = next.in(next.values, start / kBlock) + d;
                const int64_t stop = count - start < kBlock ? count - start : kBlock;
                for (int64_t t = 0; t < stop; ++t, from += head_dim, ahead += head_dim) {
                    Lanes value[num_vectors];
#pragma GCC unroll 8
                    for (int line = 0; line < int(num_vectors * lanes * sizeof(T)); line += 64)
                        __builtin_prefetch((const char*)ahead + line, 0, 2);
#pragma GCC unroll 8
                    for (int v = 0; v < num_vectors; ++v) value[v] = widen<lanes>(from + v * lanes);
#pragma GCC unroll 8
                    for (int i = 0; i < Q; ++i) {
                        const float p = scores[i][start + t];
#pragma GCC unroll 8
                        for (int v = 0; v < num_vectors; ++v) sum[i][v] += p * value[v];
                    }
                }
            }
            for (int i = 0; i < Q; ++i) std::memcpy(query[i].out + d, sum[i], sizeof(sum[i]));
        }
        if constexpr (num_vectors > 1)
            add_values<lanes, num_vectors / 2>(count, d);
        else if constexpr (lanes > 8)
            add_values<8, 1>(count, d);
    }
};

template <class T>
struct Attention {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t num_heads, num_kv_heads, head_dim;
    const T *keys, *values;
    const int64_t *members, *blocks;
    float* states;

    static int64_t num_tokens(const Task& task) { return task.num_tokens + (task.num_members - 1) * task.step; }

    Run<T> run_of(const Task& task, int64_t head, int64_t start) const {
        const int64_t size = kBlock * head_dim, left = num_tokens(task) - start, count = left < kChunk ? left : kChunk;
        const int64_t* first = blocks + task.first_block + start / kBlock;
        return {keys + head * size, values + head * size, num_kv_heads * size, first, (count + kBlock - 1) / kBlock};
    }

    // Computes queries `first` to `first + Q` of a task and a kv head on one run.
    template <int Q>
    void tile(const Task& task, int64_t head, int64_t first, int64_t start, const Run<T>& run, const Run<T>& next) const {
        Tile<T, Q> tile;
        const int64_t rep = num_heads / num_kv_heads;
        int64_t most = 0;
        for (int i = 0; i < Q; ++i) {
            const int64_t member = (first + i) / rep, row = members[task.first_member + member];
            const int64_t query = head * rep + (first + i) % rep, place = row * num_heads + query;
            const int64_t left = task.num_tokens + member * task.step - start, count = left < kChunk ? left : kChunk;
            most = count > most ? count : most;
            const float* from = q + row * q_stride + query * head_dim;
            tile.query[i] = {from, out + place * head_dim, states + 2 * place, count};
        }
        if (most <= 0) return;
        tile.run = run, tile.next = next, tile.head_dim = head_dim;
        tile.template multiply_keys<Q == 1 ? 8 : Q == 2 ? 4 : 2>(most, 0);
        tile.exponentiate(1.0f / std::sqrt(float(head_dim)), (most + kBlock - 1) / kBlock * kBlock);
        tile.template add_values<kLanes, Q == 1 ? 8 : Q == 2 ? 4 : 2>(most, 0);
    }

    void attend(const Task& task, const Task& next_task) const {
        const int64_t num_queries = task.num_members * (num_heads / num_kv_heads);
        const int64_t num_tiles = (num_queries + kTile - 1) / kTile;
        for (int64_t head = 0; head < num_kv_heads; ++head)
            for (int64_t start = 0; start < num_tokens(task); start += kChunk) {
                const Run<T> run = run_of(task, head, start);
                const Run<T> next = start + kChunk < num_tokens(task) ? run_of(task, head, start + kChunk)
                                    : head + 1 < num_kv_heads         ? run_of(task, head + 1, 0)
                                                                      : run_of(next_task, 0, 0);
                for (int64_t t = 0; t < num_tiles; ++t) {
                    const int64_t first = num_queries * t / num_tiles;
                    switch (num_queries * (t + 1) / num_tiles - first) {
                        case 1: tile<1>(task, head, first, start, run, next); break;
                        case 2: tile<2>(task, head, first, start, run, next); break;
                        case 3: tile<3>(task, head, first, start, run, next); break;
                        case 4: tile<4>(task, head, first, start, run, next); break;
                        case 5: tile<5>(task, head, first, start, run, next); break;
                        default: tile<6>(task, head, first, start, run, next);
                    }
                }
            }
    }
};

template <class T>
void store(
    const float* k, int64_t k_stride, const float* v, int64_t v_stride, const int64_t* slots, int64_t num_tokens,
    int64_t num_kv_heads, int64_t head_dim, T* keys, T* values) {
    for (int64_t n = 0; n < num_tokens; ++n)
        for (int64_t head = 0; head < num_kv_heads; ++head) {
            const int64_t token = slots[n] % kBlock, block = slots[n] / kBlock * num_kv_heads + head;
            T* key = keys + block * kBlock * head_dim + token;
            T* value = values + (block * kBlock + token) * head_dim;
            for (int64_t d = 0; d < head_dim; ++d) {
                narrow(k[n * k_stride + head * head_dim + d], key + d * kBlock);
                narrow(v[n * v_stride + head * head_dim + d], value + d);
            }
        }
}

template <class T>
void attend(
    const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* out,
    int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, T* keys, T* values,
    const int64_t* slots, const Task* tasks, int64_t num_tasks, const int64_t* members, const int64_t* blocks) {
    static thread_local std::vector<float> states;
    store(k, k_stride, v, v_stride, slots, num_tokens, num_kv_heads, head_dim, keys, values);
    const int64_t num_queries = num_tokens * num_heads;
    states.resize(2 * num_queries);
    for (int64_t i = 0; i < num_queries; ++i) {
        states[2 * i] = -INFINITY;
        states[2 * i + 1] = 0;
    }
    std::memset(out, 0, num_queries * head_dim * sizeof(float));
    const Attention<T> attention{q,    q_stride, out,     num_heads, num_kv_heads,
                                 head_dim, keys, values, members, blocks, states.data()};
    for (int64_t t = 0; t < num_tasks; ++t) attention.attend(tasks[t], tasks[t + 1 < num_tasks ? t + 1 : t]);
    for (int64_t i = 0; i < num_queries; ++i) {
        const float share = 1.0f / states[2 * i + 1];
        for (int64_t d = 0; d < head_dim; ++d) out[i * head_dim + d] *= share;
    }
}

}  // namespace

extern "C" {

const char* instructions() { return LLAMARL_INSTRUCTIONS; }

#define LLAMARL_ATTEND(name, T)                                                                                       \
    void name(                                                                                                        \
        const float* q, int64_t q_stride, const float* k, int64_t k_stride, const float* v, int64_t v_stride,         \
        float* out, int64_t num_tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, T* keys, T* values, \
        const int64_t* slots, const Task* tasks, int64_t num_tasks, const int64_t* members, const int64_t* blocks) {  \
        attend(q, q_stride, k, k_stride, v, v_stride, out, num_tokens, num_heads, num_kv_heads, head_dim, keys,       \
               values, slots, tasks, num_tasks, members, blocks);                                                     \
    }
LLAMARL_ATTEND(attend_float32, float)
LLAMARL_ATTEND(attend_bfloat16, uint16_t)
}
