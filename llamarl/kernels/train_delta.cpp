// The gated delta rule of packed tokens in training, forward and backward, with the convolution before it, in float32
// on one core. Uses no header of torch or Python.
//
// The rule is computed in chunks of tokens, as products of small matrices (arXiv 2406.06484, section 3.2). For a chunk
// with queries Q, keys K [T][K], values V, decays and strengths b, and the state S [K][V] before it:
//
//   c_t = sum of log decays up to t,   e_t = exp(c_t),   G_ts = exp(c_t - c_s) for s <= t, else 0
//   N = (I + strictly lower part of b G (K K^T))^-1  b (V - e K S)
//   outputs = e Q S + (G (Q K^T)) N,   state after it = e_T S + (G_T K)^T N
//
// where vectors multiply rows and G multiplies element by element. Backward computes each sequence's states again, keeps
// the one before each chunk, and then goes through the chunks from the last one to the first.
//
// A "turned" matrix is [channels][padded tokens]. All products have the columns of a row-major matrix in the lanes, so
// nothing is summed across lanes.

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kRows = 4;

int64_t padded(int64_t size) { return (size + kLanes - 1) / kLanes * kLanes; }

struct Sizes {
    int64_t key_heads, value_heads, key_dim, value_dim, width, chunk;
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int64_t each() const { return value_heads / key_heads; }
    int64_t keys() const { return padded(key_dim); }      // columns of a matrix of keys
    int64_t values() const { return padded(value_dim); }  // columns of a matrix of values
    int64_t tokens() const { return padded(chunk); }      // columns of a turned matrix
    int64_t state() const { return key_dim * values(); }
    int64_t query_at(int64_t j) const { return j * key_dim; }
    int64_t key_at(int64_t j) const { return (key_heads + j) * key_dim; }
    int64_t value_at(int64_t h) const { return 2 * key_heads * key_dim + h * value_dim; }
};

// Consecutive tokens. The state and the last inputs before the first one are those after `parent`; -1: zeros.
struct Sequence {
    int64_t first, count, parent;
};

// The left matrix of a product: element (i, p) is at i * row + p * column.
struct Left {
    const float* first;
    int64_t row, column;
};

template <int R, int V>
inline void multiply_tile(Left a, int64_t depth, const float* b, int64_t b_row, float* out, int64_t out_row, bool adds) {
    Floats sum[R][V] = {};
    if (adds) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] = load<Floats>(out + r * out_row + v * kLanes);
    }
    for (int64_t p = 0; p < depth; ++p) {
        Floats row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) row[v] = load<Floats>(b + p * b_row + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const float x = a.first[r * a.row + p * a.column];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[r][v] += x * row[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) std::memcpy(out + r * out_row + v * kLanes, &sum[r][v], sizeof(Floats));
}

template <int R>
inline void multiply_rows(
    Left a, int64_t depth, const float* b, int64_t b_row, int64_t columns, float* out, int64_t out_row, bool adds) {
    int64_t c = 0;
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
        multiply_tile<R, 2>(a, depth, b + c, b_row, out + c, out_row, adds);
    if (c < columns) multiply_tile<R, 1>(a, depth, b + c, b_row, out + c, out_row, adds);
}

// out [rows][columns] = or += a [rows][depth] * b [depth][columns]; columns is a multiple of kLanes.
void multiply(
    Left a, int64_t rows, int64_t depth, const float* b, int64_t b_row, int64_t columns, float* out, int64_t out_row,
    bool adds) {
    int64_t i = 0;
    for (; i + kRows <= rows; i += kRows)
        multiply_rows<kRows>(
            {a.first + i * a.row, a.row, a.column}, depth, b, b_row, columns, out + i * out_row, out_row, adds);
    for (; i < rows; ++i)
        multiply_rows<1>(
            {a.first + i * a.row, a.row, a.column}, depth, b, b_row, columns, out + i * out_row, out_row, adds);
}

void turn(const float* rows, int64_t row, int64_t count, int64_t channels, float* turned, int64_t tokens) {
    for (int64_t d = 0; d < channels; ++d)
        for (int64_t t = 0; t < tokens; ++t) turned[d * tokens + t] = t < count ? rows[t * row + d] : 0.0f;
}

void scale(float* row, int64_t size, float factor) {
    for (int64_t i = 0; i < size; ++i) row[i] *= factor;
}

float dot(const float* a, const float* b, int64_t size) {
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

inline Floats sigmoid(Floats x) {
    const Floats e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : Floats{} + 1.0f) / (1.0f + e);
}

// The convolution's outputs by token, in padded rows, and what is needed to compute them and their gradients.
struct Heads {
    Heads(const Sizes& sizes, const Sequence* sequences, int64_t num_sequences, int64_t num_tokens, const float* conv)
        : sizes(sizes), row(padded(sizes.channels())), before(num_tokens, -1), weights(sizes.width * row),
          rows(num_tokens * row + padded(sizes.key_dim + sizes.value_dim)), factors(num_tokens * 2 * sizes.key_heads) {
        for (const Sequence* one = sequences; one < sequences + num_sequences; ++one)
            for (int64_t i = 0; i < one->count; ++i) {
                const Sequence* parent = one->parent < 0 ? nullptr : sequences + one->parent;
                before[one->first + i] = i ? one->first + i - 1 : parent ? parent->first + parent->count - 1 : -1;
            }
        for (int64_t c = 0; c < sizes.channels(); ++c)
            for (int64_t w = 0; w < sizes.width; ++w) weights[w * row + c] = conv[c * sizes.width + w];
    }

    // Calls visit(w, token) for the tokens that a token's convolution sees; the newest has the last weight.
    template <class Visit>
    void for_window(int64_t token, Visit visit) const {
        for (int64_t w = sizes.width - 1; w >= 0 && token >= 0; --w, token = before[token]) visit(w, token);
    }

    Floats summed(int64_t token, int64_t c, size_t bytes, const float* mixed) const {
        Floats sum = {};
        for_window(token, [&](int64_t w, int64_t seen) {
            Floats x = {};
            std::memcpy(&x, mixed + seen * sizes.channels() + c, bytes);
            sum += x * load<Floats>(weights.data() + w * row + c);
        });
        return sum;
    }

    template <class Visit>
    void for_channels(Visit visit) const {
        const int64_t channels = sizes.channels(), whole = channels / kLanes * kLanes;
        for (int64_t c = 0; c < whole; c += kLanes) visit(c, sizeof(Floats));
        if (whole < channels) visit(whole, (channels - whole) * sizeof(float));
    }

    // Computes the rows: silu of the convolution; queries and keys divided by their norm, queries by sqrt(K) too.
    void compute(const float* mixed) {
        for (int64_t token = 0; token < int64_t(before.size()); ++token) {
            float* to = rows.data() + token * row;
            for_channels([&](int64_t c, size_t bytes) {
                const Floats x = summed(token, c, bytes, mixed), made = x * sigmoid(x);
                std::memcpy(to + c, &made, sizeof(made));
            });
            for (int64_t j = 0; j < 2 * sizes.key_heads; ++j) {
                float* head = to + j * sizes.key_dim;
                const float factor = 1.0f / std::sqrt(dot(head, head, sizes.key_dim) + 1e-6f);
                factors[token * 2 * sizes.key_heads + j] = factor;
                scale(head, sizes.key_dim, factor * query_scale(j));
            }
        }
    }

    // Turns gradients of the rows into those of the inputs and of the convolution's weights, [W][padded channels].
    void back(float* grads, const float* mixed, float* grad_mixed, float* grad_weights) const {
        std::fill(grad_mixed, grad_mixed + int64_t(before.size()) * sizes.channels(), 0.0f);
        for (int64_t token = 0; token < int64_t(before.size()); ++token) {
            float* grad = grads + token * row;
            for (int64_t j = 0; j < 2 * sizes.key_heads; ++j) {
                const float unscale = 1.0f / query_scale(j), *head = rows.data() + token * row + j * sizes.key_dim;
                float* of_head = grad + j * sizes.key_dim;
                const float along = dot(head, of_head, sizes.key_dim) * unscale * unscale;
                const float factor = factors[token * 2 * sizes.key_heads + j] * query_scale(j);
                for (int64_t i = 0; i < sizes.key_dim; ++i) of_head[i] = factor * (of_head[i] - head[i] * along);
            }
            for_channels([&](int64_t c, size_t bytes) {
                const Floats x = summed(token, c, bytes, mixed), s = sigmoid(x);
                const Floats g = load<Floats>(grad + c) * s * (1.0f + x * (1.0f - s));
                for_window(token, [&](int64_t w, int64_t seen) {
                    Floats input = {}, sum = {};
                    std::memcpy(&input, mixed + seen * sizes.channels() + c, bytes);
                    std::memcpy(&sum, grad_mixed + seen * sizes.channels() + c, bytes);
                    sum += g * load<Floats>(weights.data() + w * row + c);
                    std::memcpy(grad_mixed + seen * sizes.channels() + c, &sum, bytes);
                    const Floats total = load<Floats>(grad_weights + w * row + c) + g * input;
                    std::memcpy(grad_weights + w * row + c, &total, sizeof(total));
                });
            });
        }
    }

    float query_scale(int64_t j) const { return j < sizes.key_heads ? 1.0f / std::sqrt(float(sizes.key_dim)) : 1.0f; }

    Sizes sizes;
    int64_t row;
    std::vector<int64_t> before;  // the token before each; -1: none
    std::vector<float> weights;   // [W][row]
    std::vector<float> rows;      // with memory behind them for whole vectors of the last head
    std::vector<float> factors;   // 1 / norm of each query and key head
};

// What the value heads of a key head share in a chunk.
struct Keys {
    explicit Keys(const Sizes& sizes)
        : turned_k(sizes.key_dim * sizes.tokens()), turned_q(turned_k.size()), kk(sizes.chunk * sizes.tokens()),
          qk(kk.size()) {}

    void fill(const Sizes& sizes, const Heads& heads, int64_t head, int64_t first, int64_t num) {
        count = num, row = heads.row;
        q = heads.rows.data() + first * row + sizes.query_at(head);
        k = heads.rows.data() + first * row + sizes.key_at(head);
        const int64_t tokens = sizes.tokens();
        turn(k, row, count, sizes.key_dim, turned_k.data(), tokens);
        multiply({k, row, 1}, count, sizes.key_dim, turned_k.data(), tokens, tokens, kk.data(), tokens, false);
        multiply({q, row, 1}, count, sizes.key_dim, turned_k.data(), tokens, tokens, qk.data(), tokens, false);
    }

    int64_t count, row;
    const float *q, *k;  // rows of tokens
    std::vector<float> turned_k, turned_q;
    std::vector<float> kk, qk;  // [T][tokens]
};

// One value head in a chunk: everything that its outputs, its next state and its gradients are made of.
struct Chunk {
    explicit Chunk(const Sizes& sizes)
        : sums(sizes.chunk), grown(sizes.chunk), left(sizes.chunk), strengths(sizes.chunk),
          between(sizes.chunk * sizes.tokens()), weights(between.size()), link(between.size()), pull(between.size()),
          residual(sizes.chunk * sizes.values()), news(residual.size()), made(residual.size()) {}

    // Computes the decays between tokens, and from these the weights of the chunk's tokens on each other.
    void weigh(const Sizes& sizes, const Keys& keys, const float* decay, const float* strength) {
        const int64_t tokens = sizes.tokens(), num = keys.count;
        double sum = 0;
        for (int64_t t = 0; t < num; ++t) {
            sums[t] = sum += decay[t * sizes.value_heads];
            strengths[t] = strength[t * sizes.value_heads];
        }
        for (int64_t t = 0; t < num; ++t) {
            grown[t] = std::exp(float(sums[t])), left[t] = std::exp(float(sums[num - 1] - sums[t]));
            float *row = between.data() + t * tokens;
            for (int64_t s = 0; s < tokens; ++s) row[s] = s < t ? float(sums[t] - sums[s]) : s == t ? 0.0f : -100.0f;
            for (int64_t s = 0; s < tokens; s += kLanes) {
                const Floats made = exp_of_negative(load<Floats>(row + s));
                std::memcpy(row + s, &made, sizeof(made));
            }
            for (int64_t s = 0; s < tokens; ++s) {
                const int64_t place = t * tokens + s;
                weights[place] = row[s] * keys.qk[place];
                link[place] = s < t ? row[s] * keys.kk[place] : 0.0f;
                pull[place] = -strengths[t] * link[place];
            }
        }
    }

    // Computes N from the state before the chunk, and the rows V - e K S.
    void solve(const Sizes& sizes, const Keys& keys, const float* values, const float* state) {
        const int64_t columns = sizes.values(), num = keys.count;
        multiply(
            {keys.k, keys.row, 1}, num, sizes.key_dim, state, columns, columns, residual.data(), columns, false);
        for (int64_t t = 0; t < num; ++t) {
            float *row = residual.data() + t * columns, *to = news.data() + t * columns;
            for (int64_t i = 0; i < columns; ++i) {
                row[i] = (i < sizes.value_dim ? values[t * keys.row + i] : 0.0f) - grown[t] * row[i];
                to[i] = strengths[t] * row[i];
            }
            multiply_rows<1>({pull.data() + t * sizes.tokens(), 0, 1}, t, news.data(), columns, columns, to, columns, true);
        }
    }

    void outputs(const Sizes& sizes, const Keys& keys, const float* state, float* out) {
        const int64_t columns = sizes.values(), num = keys.count;
        multiply({keys.q, keys.row, 1}, num, sizes.key_dim, state, columns, columns, made.data(), columns, false);
        for (int64_t t = 0; t < num; ++t) scale(made.data() + t * columns, columns, grown[t]);
        multiply(
            {weights.data(), sizes.tokens(), 1}, num, num, news.data(), columns, columns, made.data(), columns, true);
        for (int64_t t = 0; t < num; ++t)
            std::copy_n(made.data() + t * columns, sizes.value_dim, out + t * sizes.value_heads * sizes.value_dim);
    }

    // Changes the state to the one after the chunk.
    void pass(const Sizes& sizes, const Keys& keys, float* state) {
        const int64_t columns = sizes.values(), num = keys.count;
        for (int64_t t = 0; t < num; ++t)
            for (int64_t i = 0; i < columns; ++i) made[t * columns + i] = left[t] * news[t * columns + i];
        scale(state, sizes.state(), grown[num - 1]);
        multiply({keys.k, 1, keys.row}, sizes.key_dim, num, made.data(), columns, columns, state, columns, true);
    }

    std::vector<double> sums;             // c; decays may be so fast that differences of float32 would lose digits
    std::vector<float> grown, left;       // e_t and G_Tt
    std::vector<float> strengths;         // b
    std::vector<float> between, weights;  // G and G (Q K^T), [T][tokens]
    std::vector<float> link, pull;        // strictly lower parts of G (K K^T) and of -b G (K K^T)
    std::vector<float> residual, news;    // V - e K S and N, [T][values]
    std::vector<float> made;
};

struct Inputs {
    const float *mixed, *decay, *strength;
};

// Runs the sequences of one key head. Calls visit(chunk number, first token, keys, value head, chunk, state before).
template <class Visit>
void run(
    const Sizes& sizes, const Sequence* sequences, int64_t num_sequences, const Heads& heads, const Inputs& inputs,
    int64_t head, Visit visit) {
    const int64_t each = sizes.each(), state_size = sizes.state();
    std::vector<float> states(num_sequences * each * state_size);
    Keys keys(sizes);
    Chunk chunk(sizes);
    int64_t number = 0;
    for (int64_t s = 0; s < num_sequences; ++s) {
        const Sequence& one = sequences[s];
        float* own = states.data() + s * each * state_size;
        if (one.parent >= 0) std::copy_n(states.data() + one.parent * each * state_size, each * state_size, own);
        for (int64_t i = 0; i < one.count; i += sizes.chunk, ++number) {
            const int64_t first = one.first + i;
            keys.fill(sizes, heads, head, first, std::min(sizes.chunk, one.count - i));
            for (int64_t e = 0; e < each; ++e) {
                const int64_t h = head * each + e, place = first * sizes.value_heads + h;
                float* state = own + e * state_size;
                chunk.weigh(sizes, keys, inputs.decay + place, inputs.strength + place);
                chunk.solve(sizes, keys, heads.rows.data() + first * heads.row + sizes.value_at(h), state);
                visit(number, first, keys, h, chunk, state);
                chunk.pass(sizes, keys, state);
            }
        }
    }
}

// Gradients of one chunk.
struct Gradients {
    explicit Gradients(const Sizes& sizes)
        : grown_grad(sizes.chunk * sizes.values()), news(grown_grad.size()), values(grown_grad.size()),
          output(grown_grad.size()), turned(sizes.value_dim * sizes.tokens()), turned_news(turned.size()),
          of_weights(sizes.chunk * sizes.tokens()), of_pull(of_weights.size()), qk(of_weights.size()),
          kk(of_weights.size()), part(sizes.key_dim * sizes.tokens()), turned_q(part.size()), turned_k(part.size()),
          q(sizes.chunk * sizes.keys()), k(q.size()), along(sizes.tokens()), sums(sizes.chunk) {}

    void clear() {
        for (auto* one : {&qk, &kk, &turned_q, &turned_k}) std::fill(one->begin(), one->end(), 0.0f);
    }

    // Computes gradients of N and of the rows V - e K S from those of the outputs and of the state after the chunk.
    void solve(const Sizes& sizes, const Keys& keys, const Chunk& chunk, const float* grad, const float* grad_state) {
        const int64_t columns = sizes.values(), num = keys.count, tokens = sizes.tokens();
        multiply({keys.k, keys.row, 1}, num, sizes.key_dim, grad_state, columns, columns, news.data(), columns, false);
        for (int64_t t = 0; t < num; ++t) {
            scale(news.data() + t * columns, columns, chunk.left[t]);
            for (int64_t i = 0; i < columns; ++i) {
                const float g = i < sizes.value_dim ? grad[t * sizes.value_heads * sizes.value_dim + i] : 0.0f;
                output[t * columns + i] = g;
                grown_grad[t * columns + i] = chunk.grown[t] * g;
            }
        }
        multiply({chunk.weights.data(), 1, tokens}, num, num, output.data(), columns, columns, news.data(), columns, true);
        for (int64_t t = num - 1; t >= 0; --t) {
            float *row = news.data() + t * columns, *to = values.data() + t * columns;
            multiply_rows<1>(
                {chunk.pull.data() + (t + 1) * tokens + t, 0, tokens}, num - 1 - t, row + columns, columns, columns, row,
                columns, true);
            for (int64_t i = 0; i < columns; ++i) to[i] = chunk.strengths[t] * row[i];
        }
    }

    // Adds to the gradients of the products of keys and queries, of decays and strengths.
    void weights(const Sizes& sizes, const Keys& keys, const Chunk& chunk, float* grad_strength) {
        const int64_t columns = sizes.values(), num = keys.count, tokens = sizes.tokens();
        turn(chunk.news.data(), columns, num, sizes.value_dim, turned_news.data(), tokens);
        multiply(
            {output.data(), columns, 1}, num, sizes.value_dim, turned_news.data(), tokens, tokens, of_weights.data(),
            tokens, false);
        multiply(
            {news.data(), columns, 1}, num, sizes.value_dim, turned_news.data(), tokens, tokens, of_pull.data(), tokens,
            false);
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int64_t t = 0; t < num; ++t) {
            float of_strength = dot(news.data() + t * columns, chunk.residual.data() + t * columns, columns);
            float gained = 0;
            for (int64_t s = 0; s < t; ++s) {
                const int64_t place = t * tokens + s;
                const float moved = of_weights[place] * chunk.weights[place] + of_pull[place] * chunk.pull[place];
                gained += moved, sums[s] -= moved;
                of_strength -= of_pull[place] * chunk.link[place];
                kk[place] -= of_pull[place] * chunk.between[place] * chunk.strengths[t];
            }
            for (int64_t s = 0; s <= t; ++s) qk[t * tokens + s] += of_weights[t * tokens + s] * chunk.between[t * tokens + s];
            sums[t] += gained;
            grad_strength[t * sizes.value_heads] = of_strength;
        }
    }

    // Adds to the turned gradients of queries or keys what they have by `state`: state * rows^T. Leaves the products
    // with the queries or keys in `along`.
    void turned_part(
        const Sizes& sizes, const float* state, const float* turned_rows, const std::vector<float>& turned_heads,
        std::vector<float>& sum) {
        const int64_t tokens = sizes.tokens();
        multiply(
            {state, sizes.values(), 1}, sizes.key_dim, sizes.value_dim, turned_rows, tokens, tokens, part.data(), tokens,
            false);
        std::fill(along.begin(), along.end(), 0.0f);
        for (int64_t d = 0; d < sizes.key_dim; ++d)
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t place = d * tokens + t;
                sum[place] += part[place];
                along[t] += part[place] * turned_heads[place];
            }
    }

    // Adds the gradients by the state before the chunk and the one after it, and changes `grad_state` from the latter's
    // to the former's.
    void states(
        const Sizes& sizes, const Keys& keys, const Chunk& chunk, const float* state, float* grad_state,
        float* grad_decay) {
        const int64_t columns = sizes.values(), num = keys.count, tokens = sizes.tokens();
        turn(grown_grad.data(), columns, num, sizes.value_dim, turned.data(), tokens);
        turned_part(sizes, state, turned.data(), keys.turned_q, turned_q);
        for (int64_t t = 0; t < num; ++t) sums[t] += along[t];
        for (int64_t d = 0; d < sizes.value_dim; ++d)
            for (int64_t t = 0; t < num; ++t) turned_news[d * tokens + t] *= chunk.left[t];
        turned_part(sizes, grad_state, turned_news.data(), keys.turned_k, turned_k);
        for (int64_t t = 0; t < num; ++t) sums[t] -= along[t], sums[num - 1] += along[t];
        sums[num - 1] += chunk.grown[num - 1] * dot(state, grad_state, sizes.state());
        scale(grad_state, sizes.state(), chunk.grown[num - 1]);
        multiply(
            {keys.q, 1, keys.row}, sizes.key_dim, num, grown_grad.data(), columns, columns, grad_state, columns, true);
        for (int64_t t = 0; t < num; ++t)
            for (int64_t i = 0; i < columns; ++i) grown_grad[t * columns + i] = -chunk.grown[t] * values[t * columns + i];
        turn(grown_grad.data(), columns, num, sizes.value_dim, turned.data(), tokens);
        turned_part(sizes, state, turned.data(), keys.turned_k, turned_k);
        multiply(
            {keys.k, 1, keys.row}, sizes.key_dim, num, grown_grad.data(), columns, columns, grad_state, columns, true);
        double later = 0;
        for (int64_t t = num - 1; t >= 0; --t) {
            later += sums[t] + along[t];
            grad_decay[t * sizes.value_heads] = float(later);
        }
    }

    // Writes gradients of queries and keys, once all value heads have added theirs.
    void finish(const Sizes& sizes, const Keys& keys, float* grad_q, float* grad_k) {
        const int64_t columns = sizes.keys(), num = keys.count, tokens = sizes.tokens();
        multiply({qk.data(), tokens, 1}, num, num, keys.k, keys.row, columns, q.data(), columns, false);
        multiply({qk.data(), 1, tokens}, num, num, keys.q, keys.row, columns, k.data(), columns, false);
        multiply({kk.data(), tokens, 1}, num, num, keys.k, keys.row, columns, k.data(), columns, true);
        multiply({kk.data(), 1, tokens}, num, num, keys.k, keys.row, columns, k.data(), columns, true);
        for (int64_t t = 0; t < num; ++t)
            for (int64_t d = 0; d < sizes.key_dim; ++d) {
                grad_q[t * keys.row + d] = q[t * columns + d] + turned_q[d * tokens + t];
                grad_k[t * keys.row + d] = k[t * columns + d] + turned_k[d * tokens + t];
            }
    }

    std::vector<float> grown_grad;             // e times gradients of outputs, then -e times those of values
    std::vector<float> news, values, output;   // of N, of V, and of the outputs, padded
    std::vector<float> turned, turned_news;    // [V][tokens]
    std::vector<float> of_weights, of_pull;    // [T][tokens]
    std::vector<float> qk, kk;                 // of Q K^T and K K^T, sums over value heads
    std::vector<float> part, turned_q, turned_k;  // [K][tokens]
    std::vector<float> q, k;                   // [T][keys]
    std::vector<float> along;
    std::vector<double> sums;                  // of c
};

// Backward of one key head. `states` are those before each chunk, [chunks][each][K][values].
void run_back(
    const Sizes& sizes, const Sequence* sequences, int64_t num_sequences, const Heads& heads, const Inputs& inputs,
    const std::vector<float>& states, int64_t number, int64_t head, const float* grad, float* grad_rows,
    float* grad_decay, float* grad_strength) {
    const int64_t each = sizes.each(), state_size = sizes.state();
    std::vector<float> grad_states(num_sequences * each * state_size);
    Keys keys(sizes);
    Chunk chunk(sizes);
    Gradients gradients(sizes);
    for (int64_t s = num_sequences - 1; s >= 0; --s) {
        const Sequence& one = sequences[s];
        float* own = grad_states.data() + s * each * state_size;
        for (int64_t i = (one.count - 1) / sizes.chunk * sizes.chunk; i >= 0; i -= sizes.chunk) {
            const int64_t first = one.first + i;
            keys.fill(sizes, heads, head, first, std::min(sizes.chunk, one.count - i));
            turn(keys.q, keys.row, keys.count, sizes.key_dim, keys.turned_q.data(), sizes.tokens());
            gradients.clear(), --number;
            for (int64_t e = 0; e < each; ++e) {
                const int64_t h = head * each + e, place = first * sizes.value_heads + h;
                const float* state = states.data() + (number * each + e) * state_size;
                float *grad_state = own + e * state_size, *to = grad_rows + first * heads.row + sizes.value_at(h);
                chunk.weigh(sizes, keys, inputs.decay + place, inputs.strength + place);
                chunk.solve(sizes, keys, heads.rows.data() + first * heads.row + sizes.value_at(h), state);
                gradients.solve(sizes, keys, chunk, grad + place * sizes.value_dim, grad_state);
                gradients.weights(sizes, keys, chunk, grad_strength + place);
                gradients.states(sizes, keys, chunk, state, grad_state, grad_decay + place);
                for (int64_t t = 0; t < keys.count; ++t)
                    std::copy_n(gradients.values.data() + t * sizes.values(), sizes.value_dim, to + t * heads.row);
            }
            float* to = grad_rows + first * heads.row;
            gradients.finish(sizes, keys, to + sizes.query_at(head), to + sizes.key_at(head));
        }
        if (one.parent < 0) continue;
        float* before = grad_states.data() + one.parent * each * state_size;
        for (int64_t i = 0; i < each * state_size; ++i) before[i] += own[i];
    }
}

}  // namespace

extern "C" {

// mixed [N][channels], conv [channels][W], decay and strength [N][H], out [N][H][V]. A sequence's parent comes before it.
void delta_forward(
    const Sequence* sequences, int64_t num_sequences, int64_t num_tokens, const float* mixed, const float* conv,
    const float* decay, const float* strength, const Sizes* given, float* out) {
    const Sizes sizes = *given;
    Heads heads(sizes, sequences, num_sequences, num_tokens, conv);
    heads.compute(mixed);
    for (int64_t head = 0; head < sizes.key_heads; ++head)
        run(sizes, sequences, num_sequences, heads, {mixed, decay, strength}, head,
            [&](int64_t, int64_t first, const Keys& keys, int64_t h, Chunk& chunk, const float* state) {
                chunk.outputs(sizes, keys, state, out + (first * sizes.value_heads + h) * sizes.value_dim);
            });
}

void delta_backward(
    const Sequence* sequences, int64_t num_sequences, int64_t num_tokens, const float* mixed, const float* conv,
    const float* decay, const float* strength, const Sizes* given, const float* grad, float* grad_mixed,
    float* grad_conv, float* grad_decay, float* grad_strength) {
    const Sizes sizes = *given;
    const Inputs inputs{mixed, decay, strength};
    Heads heads(sizes, sequences, num_sequences, num_tokens, conv);
    heads.compute(mixed);
    int64_t num_chunks = 0;
    for (const Sequence* one = sequences; one < sequences + num_sequences; ++one)
        num_chunks += (one->count + sizes.chunk - 1) / sizes.chunk;
    const int64_t each = sizes.each(), state_size = sizes.state();
    std::vector<float> states(num_chunks * each * state_size), grad_rows(num_tokens * heads.row);
    for (int64_t head = 0; head < sizes.key_heads; ++head) {
        run(sizes, sequences, num_sequences, heads, inputs, head,
            [&](int64_t number, int64_t, const Keys&, int64_t h, Chunk&, const float* state) {
                std::copy_n(state, state_size, states.data() + (number * each + h % each) * state_size);
            });
        run_back(
            sizes, sequences, num_sequences, heads, inputs, states, num_chunks, head, grad, grad_rows.data(), grad_decay,
            grad_strength);
    }
    std::vector<float> grad_weights(sizes.width * heads.row);
    heads.back(grad_rows.data(), mixed, grad_mixed, grad_weights.data());
    for (int64_t c = 0; c < sizes.channels(); ++c)
        for (int64_t w = 0; w < sizes.width; ++w) grad_conv[c * sizes.width + w] = grad_weights[w * heads.row + c];
}

}  // extern "C"
