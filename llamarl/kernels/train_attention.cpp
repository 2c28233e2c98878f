// Attention of packed tokens in training, forward and backward, on one core. Uses no header of torch or Python.
//
// A segment is a run of tokens that see each other causally and, all of them, up to two runs of other tokens: a
// response sees its group's prompt, and the common beginning of all prompts of a microbatch. Neighbors that see the
// same runs, such as the responses of a group, are computed together: short ones would leave most lanes empty.
//
// Two loops do all the work, on "turned" matrices [channels][kWide] with a vector in each lane: products of rows with
// the lanes, and sums of weighted rows into the lanes. Lanes are queries for outputs and for the gradients of queries,
// of all heads that share their keys. They are keys for the gradients of keys and values. So nothing is summed across
// lanes. Backward computes scores again, from the logarithms of their sums (arXiv 2205.14135, section 3 and appendix
// B).

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kWide = 2 * kLanes;
constexpr int kRows = 4;                           // whose scores one product computes
constexpr int kChannels = kLanes == 16 ? 8 : 4;    // filled by one sum over rows: the registers of two vectors each
constexpr int64_t kChunk = 256;                    // rows whose scores are in memory at once

struct Run {
    int64_t first, count;
};

struct Segment {
    Run own;      // tokens that see each other causally
    Run seen[2];  // tokens that all of the run see
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

// Computes scores [rows][kWide] of each row with each lane.
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

// Adds to each lane the rows, weighted by [rows][kWide].
void add(Rows rows, int64_t num_rows, const float* weights, int64_t channels, float* turned) {
    int64_t d = 0;
    for (; d + kChannels <= channels; d += kChannels)
        add_channels<kChannels>({rows.first + d, rows.stride}, num_rows, weights, turned + d * kWide);
    for (; d < channels; ++d) add_channels<1>({rows.first + d, rows.stride}, num_rows, weights, turned + d * kWide);
}

// Writes the vectors row(lane); lanes beyond `count` hold zeros.
template <class RowOf>
void turn(RowOf row, int64_t count, int64_t channels, float factor, float* turned) {
    if (count < kWide) std::fill(turned, turned + channels * kWide, 0.0f);
    for (int64_t lane = 0; lane < count; ++lane) {
        const float* from = row(lane);
        for (int64_t d = 0; d < channels; ++d) turned[d * kWide + lane] = from[d] * factor;
    }
}

// A matrix of lanes, with memory for a chunk of rows.
struct Room {
    explicit Room(int64_t channels) : first(channels * kWide), second(channels * kWide), one(channels * kWide),
          other(channels * kWide), scores(kChunk * kWide), products(kChunk * kWide) {}
    std::vector<float> first, second;  // turned
    std::vector<float> one, other;     // sums
    std::vector<float> scores, products;
};

// Adjacent segments that see the same runs.
struct Neighbors {
    Run own;
    Run seen[2];
};

bool is_same(const Run& a, const Run& b) { return a.first == b.first && a.count == b.count; }

// The segments as neighbors, and the bounds of each token's segment.
struct Layout {
    Layout(const Segment* segments, int64_t num_segments, int64_t num_tokens) : begin(num_tokens), end(num_tokens) {
        for (int64_t s = 0; s < num_segments; ++s) {
            const Segment& one = segments[s];
            std::fill_n(begin.begin() + one.own.first, one.own.count, one.own.first);
            std::fill_n(end.begin() + one.own.first, one.own.count, one.own.first + one.own.count);
            if (!groups.empty()) {
                Neighbors& last = groups.back();
                if (last.own.first + last.own.count == one.own.first && is_same(last.seen[0], one.seen[0]) &&
                    is_same(last.seen[1], one.seen[1])) {
                    last.own.count += one.own.count;
                    continue;
                }
            }
            groups.push_back({one.own, {one.seen[0], one.seen[1]}});
        }
    }
    std::vector<Neighbors> groups;
    std::vector<int64_t> begin, end;
};

// Queries of the heads that share one head of keys, in lanes: token by token, with the heads of each.
struct Queries {
    Queries(const Layout& layout, const Neighbors& group, Shape shape, int64_t kv_head, int64_t first)
        : repeats(shape.heads / shape.kv_heads), count(std::min<int64_t>(kWide, group.own.count * repeats - first)) {
        for (int64_t lane = 0; lane < kWide; ++lane) {
            const int64_t pair = first + std::min(lane, count - 1);
            tokens[lane] = group.own.first + pair / repeats;
            heads[lane] = kv_head * repeats + pair % repeats;
            begins[lane] = layout.begin[tokens[lane]];
        }
    }
    int64_t repeats, count;
    int64_t tokens[kWide], heads[kWide], begins[kWide];

    // A vector of the lane's query in [tokens][heads][head_dim].
    auto rows(const float* x, Shape shape) const {
        return [=, this](int64_t lane) { return shape.of(x, shape.heads, heads[lane], tokens[lane])[0]; };
    }

    // Calls visit(first key, number of keys, whether some lanes see only a part of them).
    template <class Visit>
    void for_keys(const Neighbors& group, Visit visit) const {
        for (const Run& seen : group.seen)
            for (int64_t i = 0; i < seen.count; i += kChunk) visit(seen.first + i, std::min(kChunk, seen.count - i), false);
        for (int64_t i = begins[0]; i <= tokens[kWide - 1]; i += kChunk)
            visit(i, std::min(kChunk, tokens[kWide - 1] + 1 - i), true);
    }

    // Sets scores of keys that a lane's query does not see to -infinity.
    void hide(float* scores, int64_t key, int64_t count) const {
        for (int64_t i = 0; i < count; ++i, ++key) {
            if (key >= begins[kWide - 1] && key <= tokens[0]) continue;  // all lanes see it
            for (int64_t lane = 0; lane < kWide; ++lane)
                if (key < begins[lane] || key > tokens[lane])
                    scores[i * kWide + lane] = -std::numeric_limits<float>::infinity();
        }
    }
};

void forward_tile(
    const float* q, const float* k, const float* v, const Neighbors& group, const Queries& queries, int64_t kv_head,
    Shape shape, int64_t num_tokens, float* out, float* lse, Room& room) {
    const int64_t channels = shape.head_dim;
    turn(queries.rows(q, shape), queries.count, channels, shape.scale, room.first.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    Floats most[2], sum[2] = {};
    most[0] = most[1] = Floats{} - std::numeric_limits<float>::infinity();
    queries.for_keys(group, [&](int64_t token, int64_t count, bool partly) {
        float* scores = room.scores.data();
        multiply(shape.of(k, shape.kv_heads, kv_head, token), count, room.first.data(), channels, scores);
        if (partly) queries.hide(scores, token, count);
        for (int half = 0; half < 2; ++half) {
            Floats now = most[half];
            for (int64_t i = 0; i < count; ++i) {
                const Floats s = load<Floats>(scores + i * kWide + half * kLanes);
                now = s > now ? s : now;
            }
            // A lane without keys so far has no sum to scale.
            const Floats shrink = now > most[half] ? exp_of_negative(most[half] - now) : Floats{} + 1.0f;
            sum[half] *= shrink;
            for (int64_t d = 0; d < channels; ++d) {
                float* lane = room.one.data() + d * kWide + half * kLanes;
                const Floats shrunk = load<Floats>(lane) * shrink;
                std::memcpy(lane, &shrunk, sizeof(shrunk));
            }
            most[half] = now;
            const Floats least = Floats{} - 1e30f, base = now > least ? now : least;  // avoids NaN in such a lane
            for (int64_t i = 0; i < count; ++i) {
                float* score = scores + i * kWide + half * kLanes;
                const Floats p = exp_of_negative(load<Floats>(score) - base);
                sum[half] += p;
                std::memcpy(score, &p, sizeof(p));
            }
        }
        add(shape.of(v, shape.kv_heads, kv_head, token), count, scores, channels, room.one.data());
    });
    for (int64_t lane = 0; lane < queries.count; ++lane) {
        const float total = sum[lane / kLanes][lane % kLanes];
        float* to = out + (queries.tokens[lane] * shape.heads + queries.heads[lane]) * channels;
        for (int64_t d = 0; d < channels; ++d) to[d] = room.one[d * kWide + lane] / total;
        lse[queries.heads[lane] * num_tokens + queries.tokens[lane]] = most[lane / kLanes][lane % kLanes] + std::log(total);
    }
}

// With queries in the lanes: p = exp(score - lse) into `scores`, p * (dp - delta) into `products`. With keys in the
// lanes, lse and delta belong to the rows.
void weigh(float* scores, float* products, int64_t count, const float* lse, const float* delta, bool of_rows) {
    for (int64_t i = 0; i < count; ++i)
        for (int half = 0; half < 2; ++half) {
            const int64_t place = i * kWide + half * kLanes;
            const Floats l = of_rows ? Floats{} + lse[i] : load<Floats>(lse + half * kLanes);
            const Floats m = of_rows ? Floats{} + delta[i] : load<Floats>(delta + half * kLanes);
            // By rounding, a score may be slightly above the logarithm of the sum.
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
    const Given& x, const Neighbors& group, const Queries& queries, int64_t kv_head, Shape shape, float* grad_q,
    Room& room) {
    const int64_t channels = shape.head_dim;
    turn(queries.rows(x.q, shape), queries.count, channels, shape.scale, room.first.data());
    turn(queries.rows(x.grad, shape), queries.count, channels, 1, room.second.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    float lse[kWide], delta[kWide];
    for (int64_t lane = 0; lane < kWide; ++lane) {
        const int64_t place = queries.heads[lane] * x.num_tokens + queries.tokens[lane];
        lse[lane] = x.lse[place];
        delta[lane] = x.delta[place];
    }
    queries.for_keys(group, [&](int64_t from, int64_t count, bool partly) {
        const Rows keys = shape.of(x.k, shape.kv_heads, kv_head, from);
        multiply(keys, count, room.first.data(), channels, room.scores.data());
        if (partly) queries.hide(room.scores.data(), from, count);
        const Rows values = shape.of(x.v, shape.kv_heads, kv_head, from);
        multiply(values, count, room.second.data(), channels, room.products.data());
        weigh(room.scores.data(), room.products.data(), count, lse, delta, false);
        add(keys, count, room.products.data(), channels, room.one.data());
    });
    for (int64_t lane = 0; lane < queries.count; ++lane) {
        float* to = grad_q + (queries.tokens[lane] * shape.heads + queries.heads[lane]) * channels;
        for (int64_t d = 0; d < channels; ++d) to[d] = room.one[d * kWide + lane] * shape.scale;
    }
}

// Keys in the lanes: of the neighbors' tokens, which queries see causally and in their segment, or of a run that all
// neighbors see.
void keys_tile(
    const Given& x, const Layout& layout, const Neighbors& group, Run keys, bool own, int64_t kv_head, Shape shape,
    float* grad_k, float* grad_v, Room& room) {
    const int64_t channels = shape.head_dim, repeats = shape.heads / shape.kv_heads, last = keys.first + keys.count - 1;
    const Rows k = shape.of(x.k, shape.kv_heads, kv_head, keys.first), v = shape.of(x.v, shape.kv_heads, kv_head, keys.first);
    turn([&](int64_t lane) { return k[lane]; }, keys.count, channels, shape.scale, room.first.data());
    turn([&](int64_t lane) { return v[lane]; }, keys.count, channels, 1, room.second.data());
    std::fill(room.one.begin(), room.one.end(), 0.0f);
    std::fill(room.other.begin(), room.other.end(), 0.0f);
    const int64_t first = own ? keys.first : group.own.first;
    const int64_t end = own ? layout.end[last] : group.own.first + group.own.count;
    for (int64_t head = kv_head * repeats; head < (kv_head + 1) * repeats; ++head)
        for (int64_t from = first; from < end; from += kChunk) {
            const int64_t count = std::min(kChunk, end - from);
            const Rows queries = shape.of(x.q, shape.heads, head, from), grads = shape.of(x.grad, shape.heads, head, from);
            float *scores = room.scores.data(), *products = room.products.data();
            multiply(queries, count, room.first.data(), channels, scores);
            for (int64_t row = 0; own && row < count; ++row) {
                const int64_t query = from + row, begin = layout.begin[query];
                if (query >= last && begin <= keys.first) continue;  // the query sees all lanes
                for (int64_t lane = 0; lane < kWide; ++lane)
                    if (keys.first + lane < begin || keys.first + lane > query)
                        scores[row * kWide + lane] = -std::numeric_limits<float>::infinity();
            }
            multiply(grads, count, room.second.data(), channels, products);
            const int64_t place = head * x.num_tokens + from;
            weigh(scores, products, count, x.lse + place, x.delta + place, true);
            add(grads, count, scores, channels, room.other.data());
            add(queries, count, products, channels, room.one.data());
        }
    for (int64_t lane = 0; lane < keys.count; ++lane)
        for (int64_t d = 0; d < channels; ++d) {
            const int64_t place = ((keys.first + lane) * shape.kv_heads + kv_head) * channels + d;
            grad_k[place] += room.one[d * kWide + lane] * shape.scale;
            grad_v[place] += room.other[d * kWide + lane];
        }
}

}  // namespace

extern "C" {

// q and out [tokens][heads][head_dim], k and v [tokens][kv_heads][head_dim], lse [heads][tokens].
void attend(
    const float* q, const float* k, const float* v, const Segment* segments, int64_t num_segments, int64_t num_tokens,
    int64_t heads, int64_t kv_heads, int64_t head_dim, float scale, float* out, float* lse) {
    const Shape shape{heads, kv_heads, head_dim, scale};
    const Layout layout(segments, num_segments, num_tokens);
    Room room(head_dim);
    for (const Neighbors& group : layout.groups)
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head)
            for (int64_t pair = 0; pair < group.own.count * (heads / kv_heads); pair += kWide) {
                const Queries queries(layout, group, shape, kv_head, pair);
                forward_tile(q, k, v, group, queries, kv_head, shape, num_tokens, out, lse, room);
            }
}

// Writes the gradient of q, and adds to the gradients of k and v. delta [heads][tokens] is scratch memory.
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
    const Layout layout(segments, num_segments, num_tokens);
    Room room(head_dim);
    for (const Neighbors& group : layout.groups)
        for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
            for (int64_t pair = 0; pair < group.own.count * (heads / kv_heads); pair += kWide) {
                const Queries queries(layout, group, shape, kv_head, pair);
                queries_tile(given, group, queries, kv_head, shape, grad_q, room);
            }
            for (const Run* run : {&group.own, &group.seen[0], &group.seen[1]})
                for (int64_t i = 0; i < run->count; i += kWide) {
                    const Run keys{run->first + i, std::min<int64_t>(kWide, run->count - i)};
                    keys_tile(given, layout, group, keys, run == &group.own, kv_head, shape, grad_k, grad_v, room);
                }
        }
}
}
