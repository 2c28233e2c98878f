// Attention of packed tokens in training, forward and backward, on one core. No header of torch or Python.
//
// A segment is a run of tokens that see each other causally and, all of them, up to two runs of tokens elsewhere: a
// response sees its group's prompt, and what all prompts of a microbatch begin with. Two loops do all the work, on "turned" matrices [channels][kWide] that have a token in each lane:
// products of rows with the lanes, and sums of weighted rows into the lanes. Lanes are queries for outputs and for the
// gradients of queries, and keys for those of keys and values, so that nothing is summed across lanes. Scores are
// computed again for backward, from the logarithms of their sums (arXiv 2205.14135, section 3 and appendix B).

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kWide = 2 * kLanes;
constexpr int kRows = 4;                           // of which one product makes the scores
constexpr int kChannels = kLanes == 16 ? 8 : 4;    // that one sum over rows fills: the registers of two vectors each
constexpr int64_t kChunk = 256;                    // rows whose scores are held at once

struct Run {
    int64_t first, count;
};

struct Segment {
    Run own;      // tokens that see each other causally
    Run seen[2];  // tokens that all of them see
};

struct Rows {
    const float* first;
    int64_t stride;
    const float* operator[](int64_t i) const { return first + i * stride; }
    Rows from(int64_t i) const { return {first + i * stride, stride}; }
};

struct Shape {
    int64_t heads, kv_heads, head_dim;
    float scale;
    Rows of(const float* x, int64_t number, int64_t head, int64_t token) const {
        return {x + (token * number + head) * head_dim, number * head_dim};
    }
};

template <int R>
inline void multiply_rows(Rows rows, const float* turned, int64_t channels, float* scores) {
    Floats sum[R][2] = {};
    for (int64_t d = 0; d < channels; ++d) {
        const Floats a = load<Floats>(turned + d * kWide), b = load<Floats>(turned + d * kWide + kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const float x = rows[r][d];
            sum[r][0] += x * a;
            sum[r][1] += x * b;
        }
    }
    for (int r = 0; r < R; ++r) std::memcpy(scores + r * kWide, sum[r], sizeof(sum[r]));
}

// Scores [rows][kWide] of each row with each lane.
void multiply(Rows rows, int64_t num_rows, const float* turned, int64_t channels, float* scores) {
    int64_t i = 0;
    for (; i + kRows <= num_rows; i += kRows) multiply_rows<kRows>(rows.from(i), turned, channels, scores + i * kWide);
    for (; i < num_rows; ++i) multiply_rows<1>(rows.from(i), turned, channels, scores + i * kWide);
}

template <int C>
inline void add_channels(Rows rows, int64_t num_rows, const float* weights, float* turned) {
    Floats sum[C][2];
    std::memcpy(sum, turned, sizeof(sum));
    for (int64_t i = 0; i < num_rows; ++i) {
        const Floats a = load<Floats>(weights + i * kWide), b = load<Floats>(weights + i * kWide + kLanes);
        const float* row = rows[i];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            sum[c][0] += row[c] * a;
            sum[c][1] += row[c] * b;
        }
    }
    std::memcpy(turned, sum, sizeof(sum));
}

// Adds to each lane the rows by its weights [rows][kWide].
void add(Rows rows, int64_t num_rows, const float* weights, int64_t channels, float* turned) {
    int64_t d = 0;
    for (; d + kChannels <= channels; d += kChannels)
        add_channels<kChannels>({rows.first + d, rows.stride}, num_rows, weights, turned + d * kWide);
    for (; d < channels; ++d) add_channels<1>({rows.first + d, rows.stride}, num_rows, weights, turned + d * kWide);
}

// Lanes beyond `count` hold zeros.
void turn(Rows rows, int64_t count, int64_t channels, float factor, float* turned) {
    for (int64_t d = 0; d < channels; ++d)
        for (int64_t lane = 0; lane < kWide; ++lane) turned[d * kWide + lane] = lane < count ? rows[lane][d] * factor : 0;
}

// A matrix of lanes, with room for a chunk of rows.
struct Room {
    explicit Room(int64_t channels) : first(channels * kWide), second(channels * kWide), one(channels * kWide),
          other(channels * kWide), scores(kChunk * kWide), products(kChunk * kWide) {}
    std::vector<float> first, second;  // turned
    std::vector<float> one, other;     // sums
    std::vector<float> scores, products;
};

// Calls visit(rows that are keys, their number, place among the segment's own or -1) for what queries up to `last` see.
template <class Visit>
void for_keys(const Segment& segment, int64_t last, Visit visit) {
    for (const Run& seen : segment.seen)
        for (int64_t i = 0; i < seen.count; i += kChunk)
            visit(seen.first + i, std::min(kChunk, seen.count - i), int64_t(-1));
    for (int64_t i = 0; i <= last; i += kChunk) visit(segment.own.first + i, std::min(kChunk, last + 1 - i), i);
}

struct Lanes {
    int64_t first, count;  // places in a segment
};

// Scores of keys that come after a lane's query are -infinity.
void hide(float* scores, int64_t num_keys, int64_t place, Lanes lanes) {
    for (int64_t i = std::max<int64_t>(0, lanes.first - place); i < num_keys; ++i)
        for (int64_t lane = 0; lane < kWide; ++lane)
            if (place + i > lanes.first + lane) scores[i * kWide + lane] = -std::numeric_limits<float>::infinity();
}

void forward_tile(
    const float* k, const float* v, const Segment& segment, Lanes lanes, int64_t kv_head, Rows q, Shape shape,
    float* out, float* lse, int64_t out_stride, int64_t lse_stride, Room& room) {
    const int64_t channels = shape.head_dim;
    turn(q, lanes.count, channels, shape.scale, room.first.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    Floats most[2], sum[2] = {};
    most[0] = most[1] = Floats{} - std::numeric_limits<float>::infinity();
    for_keys(segment, lanes.first + lanes.count - 1, [&](int64_t token, int64_t count, int64_t place) {
        float* scores = room.scores.data();
        multiply(shape.of(k, shape.kv_heads, kv_head, token), count, room.first.data(), channels, scores);
        if (place >= 0) hide(scores, count, place, lanes);
        for (int half = 0; half < 2; ++half) {
            Floats now = most[half];
            for (int64_t i = 0; i < count; ++i) {
                const Floats s = load<Floats>(scores + i * kWide + half * kLanes);
                now = s > now ? s : now;
            }
            // A lane that has seen nothing yet has nothing to shrink.
            const Floats shrink = now > most[half] ? exp_of_negative(most[half] - now) : Floats{} + 1.0f;
            sum[half] *= shrink;
            for (int64_t d = 0; d < channels; ++d) {
                float* lane = room.one.data() + d * kWide + half * kLanes;
                const Floats shrunk = load<Floats>(lane) * shrink;
                std::memcpy(lane, &shrunk, sizeof(shrunk));
            }
            most[half] = now;
            for (int64_t i = 0; i < count; ++i) {
                float* score = scores + i * kWide + half * kLanes;
                const Floats p = exp_of_negative(load<Floats>(score) - now);
                sum[half] += p;
                std::memcpy(score, &p, sizeof(p));
            }
        }
        add(shape.of(v, shape.kv_heads, kv_head, token), count, scores, channels, room.one.data());
    });
    for (int64_t lane = 0; lane < lanes.count; ++lane) {
        const float total = sum[lane / kLanes][lane % kLanes];
        for (int64_t d = 0; d < channels; ++d) out[lane * out_stride + d] = room.one[d * kWide + lane] / total;
        lse[lane * lse_stride] = most[lane / kLanes][lane % kLanes] + std::log(total);
    }
}

// With queries in the lanes: p = exp(score - lse) into `scores`, p * (dp - delta) into `products`. With keys in the
// lanes lse and delta are those of the rows.
void weigh(float* scores, float* products, int64_t count, const float* lse, const float* delta, bool of_rows) {
    for (int64_t i = 0; i < count; ++i)
        for (int half = 0; half < 2; ++half) {
            const int64_t place = i * kWide + half * kLanes;
            const Floats l = of_rows ? Floats{} + lse[i] : load<Floats>(lse + half * kLanes);
            const Floats m = of_rows ? Floats{} + delta[i] : load<Floats>(delta + half * kLanes);
            // Rounding may take a score above the logarithm of the sum by a little.
            const Floats x = load<Floats>(scores + place) - l;
            const Floats p = exp_of_negative(x > 0 ? Floats{} : x);
            const Floats ds = p * (load<Floats>(products + place) - m);
            std::memcpy(scores + place, &p, sizeof(p));
            std::memcpy(products + place, &ds, sizeof(ds));
        }
}

struct Given {
    const float *q, *k, *v, *grad, *lse, *delta;  // the last two by head, then token
    int64_t num_tokens;
};

void queries_tile(
    const Given& x, const Segment& segment, Lanes lanes, int64_t head, Shape shape, float* grad_q, Room& room) {
    const int64_t channels = shape.head_dim, kv_head = head / (shape.heads / shape.kv_heads);
    const int64_t token = segment.own.first + lanes.first;
    turn(shape.of(x.q, shape.heads, head, token), lanes.count, channels, shape.scale, room.first.data());
    turn(shape.of(x.grad, shape.heads, head, token), lanes.count, channels, 1, room.second.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    float lse[kWide] = {}, delta[kWide] = {};
    std::memcpy(lse, x.lse + head * x.num_tokens + token, lanes.count * sizeof(float));
    std::memcpy(delta, x.delta + head * x.num_tokens + token, lanes.count * sizeof(float));
    for_keys(segment, lanes.first + lanes.count - 1, [&](int64_t from, int64_t count, int64_t place) {
        const Rows keys = shape.of(x.k, shape.kv_heads, kv_head, from);
        multiply(keys, count, room.first.data(), channels, room.scores.data());
        if (place >= 0) hide(room.scores.data(), count, place, lanes);
        const Rows values = shape.of(x.v, shape.kv_heads, kv_head, from);
        multiply(values, count, room.second.data(), channels, room.products.data());
        weigh(room.scores.data(), room.products.data(), count, lse, delta, false);
        add(keys, count, room.products.data(), channels, room.one.data());
    });
    for (int64_t lane = 0; lane < lanes.count; ++lane)
        for (int64_t d = 0; d < channels; ++d)
            grad_q[((token + lane) * shape.heads + head) * channels + d] = room.one[d * kWide + lane] * shape.scale;
}

// Keys of a run in the lanes: the segment's own, which its queries see causally, or one that all of them see.
void keys_tile(
    const Given& x, const Segment& segment, const Run& keys, Lanes lanes, int64_t kv_head, Shape shape, float* grad_k,
    float* grad_v, Room& room) {
    const int64_t channels = shape.head_dim, repeats = shape.heads / shape.kv_heads;
    const bool own = &keys == &segment.own;
    const int64_t token = keys.first + lanes.first;
    turn(shape.of(x.k, shape.kv_heads, kv_head, token), lanes.count, channels, shape.scale, room.first.data());
    turn(shape.of(x.v, shape.kv_heads, kv_head, token), lanes.count, channels, 1, room.second.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    std::fill(room.other.begin(), room.other.end(), 0.0f);
    for (int64_t head = kv_head * repeats; head < (kv_head + 1) * repeats; ++head)
        for (int64_t i = own ? lanes.first : 0; i < segment.own.count; i += kChunk) {
            const int64_t count = std::min(kChunk, segment.own.count - i), from = segment.own.first + i;
            const Rows queries = shape.of(x.q, shape.heads, head, from), grads = shape.of(x.grad, shape.heads, head, from);
            float *scores = room.scores.data(), *products = room.products.data();
            multiply(queries, count, room.first.data(), channels, scores);
            for (int64_t row = 0; own && row < count && i + row < lanes.first + kWide; ++row)
                for (int64_t lane = std::max<int64_t>(0, i + row + 1 - lanes.first); lane < kWide; ++lane)
                    scores[row * kWide + lane] = -std::numeric_limits<float>::infinity();
            multiply(grads, count, room.second.data(), channels, products);
            const int64_t place = head * x.num_tokens + from;
            weigh(scores, products, count, x.lse + place, x.delta + place, true);
            add(grads, count, scores, channels, room.other.data());
            add(queries, count, products, channels, room.one.data());
        }
    for (int64_t lane = 0; lane < lanes.count; ++lane)
        for (int64_t d = 0; d < channels; ++d) {
            const int64_t place = ((token + lane) * shape.kv_heads + kv_head) * channels + d;
            grad_k[place] += room.one[d * kWide + lane] * shape.scale;
            grad_v[place] += room.other[d * kWide + lane];
        }
}

// Calls visit(first, count) for lanes of so many tokens.
template <class Visit>
void for_tiles(int64_t count, Visit visit) {
    for (int64_t first = 0; first < count; first += kWide) visit(Lanes{first, std::min<int64_t>(kWide, count - first)});
}

}  // namespace

extern "C" {

// q and out [tokens][heads][head_dim], k and v [tokens][kv_heads][head_dim], lse [heads][tokens].
void attend(
    const float* q, const float* k, const float* v, const Segment* segments, int64_t num_segments, int64_t num_tokens,
    int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, float* out, float* lse) {
    const Shape shape{heads, kv_heads, head_dim, scale};
    Room room(head_dim);
    for (int64_t s = 0; s < num_segments; ++s)
        for (int64_t head = 0; head < heads; ++head)
            for_tiles(segments[s].own.count, [&](Lanes lanes) {
                const int64_t token = segments[s].own.first + lanes.first;
                forward_tile(
                    k, v, segments[s], lanes, head / (heads / kv_heads), shape.of(q, heads, head, token), shape,
                    out + (token * heads + head) * head_dim, lse + head * num_tokens + token, heads * head_dim, 1, room);
            });
}

// Gradients of q, which is written, and of k and v, to which is added. delta [heads][tokens] is scratch.
void attend_backward(
    const float* grad, const float* q, const float* k, const float* v, const float* out, const float* lse,
    const Segment* segments, int64_t num_segments, int64_t num_tokens, int64_t heads, int64_t kv_heads,
    int64_t head_dim, float scale, float* delta, float* grad_q, float* grad_k, float* grad_v) {
    const Shape shape{heads, kv_heads, head_dim, scale};
    for (int64_t token = 0; token < num_tokens; ++token)
        for (int64_t head = 0; head < heads; ++head) {
            const float *a = grad + (token * heads + head) * head_dim, *b = out + (token * heads + head) * head_dim;
            float sum = 0;
            for (int64_t d = 0; d < head_dim; ++d) sum += a[d] * b[d];
            delta[head * num_tokens + token] = sum;
        }
    const Given given{q, k, v, grad, lse, delta, num_tokens};
    Room room(head_dim);
    for (int64_t s = 0; s < num_segments; ++s) {
        for (int64_t head = 0; head < heads; ++head)
            for_tiles(segments[s].own.count, [&](Lanes lanes) {
                queries_tile(given, segments[s], lanes, head, shape, grad_q, room);
            });
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
            for (const Run* keys : {&segments[s].own, &segments[s].seen[0], &segments[s].seen[1]})
                for_tiles(keys->count, [&](Lanes lanes) {
                    keys_tile(given, segments[s], *keys, lanes, kv_head, shape, grad_k, grad_v, room);
                });
    }
}
}
