// Small operations of a decode step in float32, one pass over memory each, on one core. Uses no header of torch or
// Python.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

inline float inverse_norm(const float* x, int64_t width, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / float(width) + eps);
}

// The last vector of a row may be short. Its other lanes are `filler`.
inline Floats load_part(const float* from, int64_t count, float filler) {
    if (count >= kLanes) return load<Floats>(from);
    Floats v = Floats{} + filler;
    std::memcpy(&v, from, count * sizeof(float));
    return v;
}

inline void store_part(Floats v, float* to, int64_t count) {
    if (count >= kLanes) std::memcpy(to, &v, sizeof(v));
    else std::memcpy(to, &v, count * sizeof(float));
}

// Logits of one row, cut into stretches. Each is read once from memory, for its sum of exp(x - m) with the largest
// logit m so far. The stretch that contains the noise is then searched token by token.
class Distribution {
  public:
    Distribution(const float* x, int64_t size, float scale) : x_(x), size_(size), scale_(scale) {
        static thread_local std::vector<Stretch> stretches;
        stretches.clear();
        for (int64_t start = 0; start < size; start += kStretch) {
            const int64_t stop = start + kStretch < size ? start + kStretch : size;
            Floats wide = Floats{} - FLT_MAX;
            for (int64_t i = start; i < stop; i += kLanes) {
                const Floats v = part(i, stop);
                wide = v > wide ? v : wide;
            }
            if (largest(wide) > most_) most_ = largest(wide), best_ = start;
            Floats sum = {};
            for (int64_t i = start; i < stop; i += kLanes) sum += exp_of_negative(part(i, stop) - most_);
            stretches.push_back({start, stop, most_, total(sum)});
        }
        for (Stretch& stretch : stretches) {
            stretch.sum *= std::exp(double(stretch.most) - double(most_));
            total_ += stretch.sum;
        }
        stretches_ = &stretches;
    }

    // Returns the first of the likeliest tokens.
    int64_t mode() const {
        for (int64_t i = best_; i < size_; ++i)
            if (x_[i] * scale_ == most_) return i;
        return 0;
    }

    // Returns the token at which the cumulative distribution passes `noise`, in [0, 1). Its probability is above 0.
    int64_t invert(double noise) const {
        double left = noise * total_;
        for (const Stretch& stretch : *stretches_) {
            if (!(left < stretch.sum)) {
                left -= stretch.sum;
                continue;
            }
            int64_t last = -1;
            for (int64_t i = stretch.start; i < stretch.stop; i += kLanes) {
                const Floats p = exp_of_negative(part(i, stretch.stop) - most_);
                for (int lane = 0; lane < kLanes; ++lane) {
                    if (!(p[lane] > 0)) continue;
                    last = i + lane;
                    left -= p[lane];
                    if (left < 0) return last;
                }
            }
            // By rounding, these sums may be slightly less than the stretch's.
            if (last >= 0) return last;
        }
        return mode();
    }

    float logprob(int64_t token) const { return float(x_[token] * scale_ - most_ - std::log(total_)); }

  private:
    struct Stretch {
        int64_t start, stop;
        float most;
        double sum;
    };
    static constexpr int64_t kStretch = 512;

    Floats part(int64_t i, int64_t stop) const { return load_part(x_ + i, stop - i, -INFINITY) * scale_; }

    const float* x_;
    int64_t size_;
    float scale_;
    float most_ = -FLT_MAX;  // finite, because -inf minus -inf is NaN
    int64_t best_ = 0;
    double total_ = 0;
    const std::vector<Stretch>* stretches_;
};

}  // namespace

extern "C" {

void rms_norm(const float* x, const float* weight, float* y, int64_t num_rows, int64_t width, float eps) {
    for (int64_t row = 0; row < num_rows; ++row, x += width, y += width) {
        const float inverse = inverse_norm(x, width, eps);
        for (int64_t i = 0; i < width; ++i) y[i] = x[i] * inverse * weight[i];
    }
}

// Gradients of x, and of the weights, summed over the rows: in float for some rows, then in double.
void rms_norm_backward(
    const float* grad, const float* x, const float* weight, float* grad_x, float* grad_weight, int64_t num_rows,
    int64_t width, float eps) {
    constexpr int64_t kRows = 64;
    std::vector<float> part(width);
    std::vector<double> sum(width);
    for (int64_t start = 0; start < num_rows; start += kRows) {
        const int64_t stop = start + kRows < num_rows ? start + kRows : num_rows;
        std::fill(part.begin(), part.end(), 0.0f);
        for (int64_t row = start; row < stop; ++row, grad += width, x += width, grad_x += width) {
            const float inverse = inverse_norm(x, width, eps);
            float dot = 0;
            for (int64_t i = 0; i < width; ++i) dot += grad[i] * weight[i] * x[i];
            const float along = dot * inverse * inverse / float(width);
            for (int64_t i = 0; i < width; ++i) {
                part[i] += grad[i] * x[i] * inverse;
                grad_x[i] = (grad[i] * weight[i] - x[i] * along) * inverse;
            }
        }
        for (int64_t i = 0; i < width; ++i) sum[i] += part[i];
    }
    for (int64_t i = 0; i < width; ++i) grad_weight[i] = float(sum[i]);
}

// Norms heads in place if there is a weight, then rotates channel i of the first `rotary_dim` with channel i + half.
void rotate(
    float* x, int64_t stride, int64_t num_heads, const float* weight, const float* cosine, const float* sine,
    int64_t table_stride, int64_t num_rows, int64_t head_dim, int64_t rotary_dim, float eps) {
    const int64_t half = rotary_dim / 2;
    for (int64_t row = 0; row < num_rows; ++row, x += stride, cosine += table_stride, sine += table_stride) {
        for (int64_t head = 0; head < num_heads; ++head) {
            float *low = x + head * head_dim, *high = low + half;
            if (weight) {
                const float inverse = inverse_norm(low, head_dim, eps);
                for (int64_t i = 0; i < head_dim; ++i) low[i] = low[i] * inverse * weight[i];
            }
#pragma GCC ivdep
            for (int64_t i = 0; i < half; ++i) {
                const float a = low[i], b = high[i];
                low[i] = a * cosine[i] + b * sine[i];
                high[i] = b * cosine[half + i] + a * sine[half + i];
            }
        }
    }
}

// gate / (1 + exp(-gate)) * up
void silu_mul(
    const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, float* y, int64_t num_rows,
    int64_t width) {
    for (int64_t row = 0; row < num_rows; ++row, gate += gate_stride, up += up_stride, y += width)
        for (int64_t i = 0; i < width; i += kLanes) {
            const Floats g = load_part(gate + i, width - i, 0), u = load_part(up + i, width - i, 0);
            const Floats e = exp_of_negative(g > 0 ? -g : g);
            store_part((g > 0 ? g : g * e) / (1.0f + e) * u, y + i, width - i);
        }
}

// With s = 1 / (1 + exp(-gate)): grad * up * s * (1 + gate * (1 - s)) and grad * gate * s
void silu_mul_backward(
    const float* grad, const float* gate, const float* up, float* grad_gate, float* grad_up, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const Floats g = load_part(gate + i, size - i, 0), u = load_part(up + i, size - i, 0);
        const Floats y = load_part(grad + i, size - i, 0), e = exp_of_negative(g > 0 ? -g : g);
        const Floats s = (g > 0 ? Floats{} + 1.0f : e) / (1.0f + e);
        store_part(y * u * s * (1.0f + g * (1.0f - s)), grad_gate + i, size - i);
        store_part(y * g * s, grad_up + i, size - i);
    }
}

void draw(
    const float* logits, int64_t num_rows, int64_t size, const float* temperature, const float* noise, int64_t* tokens,
    float* logprobs) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const bool greedy = temperature[row] == 0;
        const Distribution distribution(logits + row * size, size, greedy ? 1.0f : 1.0f / temperature[row]);
        tokens[row] = greedy ? distribution.mode() : distribution.invert(noise[row]);
        logprobs[row] = distribution.logprob(tokens[row]);
    }
}
}
