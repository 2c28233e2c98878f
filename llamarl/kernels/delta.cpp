// The gated delta rule in its recurrent form, with the convolution before it, in float32 on one core. Uses no header of
// torch or Python.
//
// A run is consecutive tokens of one sequence, whose state and last inputs are read from one slot and written to
// another. A decoded token is a run of length 1, so a token has the same bits whether it was decoded or prefilled, and
// whatever is computed next to it. A block of columns of a state is read once from memory for each run: its K rows stay
// in the cache between the two passes of a token.

#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

namespace {

constexpr int kBlock = 4;  // vectors of columns that are computed together

struct Sizes {
    int64_t key_heads, value_heads, key_dim, value_dim, width;
    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

inline Floats sigmoid(Floats x) {
    const Floats e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : Floats{} + 1.0f) / (1.0f + e);
}

inline Floats silu(Floats x) { return x * sigmoid(x); }

inline float sigmoid(float x) { return sigmoid(Floats{} + x)[0]; }

// Convolves the tokens of a run: y has a padded row for each. `before` holds the last inputs, the oldest first.
void convolve(
    const Sizes& sizes, const float* weights, const float* before, const float* x, int64_t count, float* y,
    int64_t stride) {
    const int64_t channels = sizes.channels(), behind = sizes.width - 1;
    for (int64_t t = 0; t < count; ++t)
        for (int64_t c = 0; c < channels; c += kLanes) {
            const size_t bytes = (channels - c < kLanes ? channels - c : kLanes) * sizeof(float);
            Floats sum = {};
            for (int64_t w = 0; w < sizes.width; ++w) {
                const int64_t token = t + w - behind;
                Floats seen = {};
                std::memcpy(&seen, (token < 0 ? before + (behind + token) * channels : x + token * channels) + c, bytes);
                sum += seen * load<Floats>(weights + w * stride + c);
            }
            const Floats made = silu(sum);
            std::memcpy(y + t * stride + c, &made, sizeof(made));
        }
}

// Divides a head by its norm, times `scale`.
void normalize(float* head, int64_t size, float scale) {
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += head[i] * head[i];
    const float factor = scale / std::sqrt(sum + 1e-6f);
    for (int64_t i = 0; i < size; ++i) head[i] *= factor;
}

// One token of one head: changes a state whose rows have a padded length, and returns the output.
void token(
    const float* q, const float* k, const float* v, float kept, float strength, int64_t key_dim, int64_t stride,
    float* state, float* out) {
    for (int64_t first = 0; first < stride; first += kBlock * kLanes) {
        const int num = int((stride - first) / kLanes < kBlock ? (stride - first) / kLanes : kBlock);
        Floats found[kBlock] = {}, made[kBlock] = {}, error[kBlock] = {};
        for (int64_t i = 0; i < key_dim; ++i)
            for (int b = 0; b < num; ++b) found[b] += k[i] * load<Floats>(state + i * stride + first + b * kLanes);
        for (int b = 0; b < num; ++b)
            error[b] = strength * (load<Floats>(v + first + b * kLanes) - kept * found[b]);
        for (int64_t i = 0; i < key_dim; ++i)
            for (int b = 0; b < num; ++b) {
                float* place = state + i * stride + first + b * kLanes;
                const Floats row = kept * load<Floats>(place) + k[i] * error[b];
                made[b] += q[i] * row;
                std::memcpy(place, &row, sizeof(row));
            }
        for (int b = 0; b < num; ++b) std::memcpy(out + first + b * kLanes, &made[b], sizeof(made[b]));
    }
}

}  // namespace

extern "C" {

// Log decays and strengths of each head. Rows are computed alike, wherever they are.
void delta_gates(
    const float* b, int64_t b_stride, const float* a, int64_t a_stride, const float* a_log, const float* dt_bias,
    float* decay, float* strength, int64_t num_rows, int64_t num_heads) {
    for (int64_t row = 0; row < num_rows; ++row, b += b_stride, a += a_stride)
        for (int64_t h = 0; h < num_heads; ++h) {
            const float x = a[h] + dt_bias[h];
            const float soft = (x > 0 ? x : 0) + std::log1p(std::exp(x > 0 ? -x : x));
            *decay++ = -std::exp(a_log[h]) * soft;
            *strength++ = sigmoid(b[h]);
        }
}

// Multiplies rows by the sigmoid of a gate for each channel, or of one gate for the row.
void sigmoid_mul(
    const float* x, const float* gate, int64_t gate_stride, int64_t gate_width, float* y, int64_t num_rows,
    int64_t width) {
    for (int64_t row = 0; row < num_rows; ++row, x += width, y += width, gate += gate_stride) {
        const float one = gate_width == 1 ? sigmoid(gate[0]) : 0.0f;
        for (int64_t i = 0; i < width; i += kLanes) {
            const size_t bytes = (width - i < kLanes ? width - i : kLanes) * sizeof(float);
            Floats v = {}, g = {};
            std::memcpy(&v, x + i, bytes);
            if (gate_width > 1) std::memcpy(&g, gate + i, bytes);
            v *= gate_width == 1 ? Floats{} + one : sigmoid(g);
            std::memcpy(y + i, &v, bytes);
        }
    }
}

// Computes all runs in order. A run is (first token, number of tokens, slot to read, slot to write).
void delta_runs(
    const int64_t* runs, int64_t num_runs, const float* mixed, const float* conv, const float* decay,
    const float* strength, float* states, float* inputs, float* out, int64_t key_heads, int64_t value_heads,
    int64_t key_dim, int64_t value_dim, int64_t width) {
    const Sizes sizes{key_heads, value_heads, key_dim, value_dim, width};
    const int64_t channels = sizes.channels(), behind = width - 1, each = value_heads / key_heads;
    const int64_t stride = (channels + kLanes - 1) / kLanes * kLanes;
    const int64_t columns = (value_dim + kLanes - 1) / kLanes * kLanes;
    const int64_t of_head = key_dim * value_dim, of_slot = value_heads * of_head;
    static thread_local std::vector<float> weights, heads, tail, tile, padded, made;
    weights.assign(width * stride, 0.0f);
    for (int64_t c = 0; c < channels; ++c)
        for (int64_t w = 0; w < width; ++w) weights[w * stride + c] = conv[c * width + w];
    tile.assign(key_dim * columns, 0.0f);
    padded.assign(columns, 0.0f), made.assign(columns, 0.0f), tail.resize(behind * channels);
    for (const int64_t* run = runs; run < runs + 4 * num_runs; run += 4) {
        const int64_t start = run[0], count = run[1], read = run[2], write = run[3];
        const float* x = mixed + start * channels;
        const float* before = inputs + read * behind * channels;
        heads.resize(count * stride);
        convolve(sizes, weights.data(), before, x, count, heads.data(), stride);
        for (int64_t d = 0; d < behind; ++d) {
            const int64_t token = count + d - behind;
            const float* from = token < 0 ? before + (behind + token) * channels : x + token * channels;
            std::memcpy(tail.data() + d * channels, from, channels * sizeof(float));
        }
        std::memcpy(inputs + write * behind * channels, tail.data(), behind * channels * sizeof(float));
        for (int64_t t = 0; t < count; ++t)
            for (int64_t j = 0; j < 2 * key_heads; ++j) {
                const float scale = j < key_heads ? 1.0f / std::sqrt(float(key_dim)) : 1.0f;
                normalize(heads.data() + t * stride + j * key_dim, key_dim, scale);
            }
        for (int64_t h = 0; h < value_heads; ++h) {
            const float* from = states + read * of_slot + h * of_head;
            float* to = states + write * of_slot + h * of_head;
            const bool is_whole = columns == value_dim;
            float* state = is_whole ? to : tile.data();
            if (is_whole && from != to) std::memcpy(to, from, of_head * sizeof(float));
            for (int64_t i = 0; !is_whole && i < key_dim; ++i)
                std::memcpy(state + i * columns, from + i * value_dim, value_dim * sizeof(float));
            for (int64_t t = 0; t < count; ++t) {
                const float* row = heads.data() + t * stride;
                const int64_t place = (start + t) * value_heads + h;
                std::memcpy(padded.data(), row + 2 * key_heads * key_dim + h * value_dim, value_dim * sizeof(float));
                const float* q = row + h / each * key_dim;
                const float kept = std::exp(decay[place]);
                token(q, q + key_heads * key_dim, padded.data(), kept, strength[place], key_dim, columns, state, made.data());
                std::memcpy(out + place * value_dim, made.data(), value_dim * sizeof(float));
            }
            for (int64_t i = 0; !is_whole && i < key_dim; ++i)
                std::memcpy(to + i * value_dim, state + i * columns, value_dim * sizeof(float));
        }
    }
}

}  // extern "C"
