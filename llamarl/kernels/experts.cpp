// The feed-forward of a mixture of experts on one core, in float32 around the products. Uses no header of torch or
// Python.
//
// Places of rows are sorted by expert, rows of one expert in their order, and each chosen expert is read once. The
// products are those of `linear.cpp`, `panels.cpp` and `packed.cpp`, in which a row's bits do not depend on other rows.
// A row sums its experts' outputs in the order of their numbers. So the bits of a row do not depend on other rows.

#include "rows.h"
#include "vectors.h"

namespace {

thread_local Scratch order_scratch, rows_scratch, inner_scratch, hidden_scratch, out_scratch;

using Plain = void (*)(const float*, const void*, const float*, float*, int64_t, int64_t, int64_t, int);
using Scaled = void (*)(const float*, const void*, const float*, const float*, float*, int64_t, int64_t, int64_t, int);
using SiluMul = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t);

// Fills `taken` with the indices of the `count` largest values, the largest first, among equal ones the first.
void largest(const float* values, int64_t num, int64_t count, int64_t* taken) {
    for (int64_t candidate = 0, filled = 0; candidate < num; ++candidate) {
        int64_t at = filled;
        while (at > 0 && values[candidate] > values[taken[at - 1]]) --at;
        if (at == count) continue;
        filled += filled < count;
        for (int64_t later = filled - 1; later > at; --later) taken[later] = taken[later - 1];
        taken[at] = candidate;
    }
}

// Scores of one row, in whole vectors: a softmax over the experts, or the sigmoid of each.
void score(const float* logits, int64_t num, bool is_sigmoid, float* scores) {
    float most = is_sigmoid ? 0.0f : logits[0], sum = 0.0f;
    for (int64_t i = 0; i < num && !is_sigmoid; ++i) most = logits[i] > most ? logits[i] : most;
    for (int64_t i = 0; i < num; i += kLanes) {
        Floats x = {};
        std::memcpy(&x, logits + i, (num - i < kLanes ? num - i : kLanes) * sizeof(float));
        if (is_sigmoid) {
            const Floats e = exp_of_negative(x > 0 ? -x : x);
            x = (x > 0 ? 1.0f : e) / (1.0f + e);
        } else {
            x = exp_of_negative(x - most);
        }
        std::memcpy(scores + i, &x, sizeof(x));
    }
    for (int64_t i = 0; i < num && !is_sigmoid; ++i) sum += scores[i];
    for (int64_t i = 0; i < num && !is_sigmoid; ++i) scores[i] /= sum;
}

}  // namespace

extern "C" {

// One projection of all experts.
struct Matrices {
    void* multiply;
    const char* first;  // weights of the first expert; each next expert's are `step_bytes` further
    int64_t step_bytes;
    const float* scales;  // a row for each expert; null if the weights have none
    int64_t num_outputs, num_inputs;

    void operator()(int64_t expert, const float* x, float* y, int64_t num_rows) const {
        const char* w = first + expert * step_bytes;
        const float* own = scales + expert * num_outputs;
        if (scales) ((Scaled)multiply)(x, w, own, nullptr, y, num_rows, num_outputs, num_inputs, 0);
        else ((Plain)multiply)(x, w, nullptr, y, num_rows, num_outputs, num_inputs, 0);
    }
};

// y[row] = sum over the row's experts of gates * down(silu(gate(x[row])) * up(x[row])). Experts are numbered from
// `first` on, and others add nothing. Without `up`, `gate` has both outputs side by side.
void feed_forward(
    const Matrices* gate, const Matrices* up, const Matrices* down, SiluMul silu_mul, const float* x,
    const int64_t* ids, const float* gates, float* y, int64_t num_rows, int64_t per_row, int64_t first,
    int64_t num_experts) {
    const int64_t dim = gate->num_inputs, width = down->num_inputs, num_places = num_rows * per_row;
    int64_t *ends = order_scratch.get<int64_t>(num_experts + 1 + num_places), *order = ends + num_experts + 1;
    std::memset(y, 0, num_rows * dim * sizeof(float));
    std::memset(ends, 0, (num_experts + 1) * sizeof(int64_t));
    const auto is_here = [&](int64_t place) { return ids[place] >= first && ids[place] < first + num_experts; };
    for (int64_t place = 0; place < num_places; ++place)
        if (is_here(place)) ++ends[ids[place] - first + 1];
    for (int64_t expert = 0; expert < num_experts; ++expert) ends[expert + 1] += ends[expert];
    for (int64_t place = 0; place < num_places; ++place)
        if (is_here(place)) order[ends[ids[place] - first]++] = place;  // afterwards ends[e] is the end of expert e
    float* rows = rows_scratch.get<float>(kChunk * dim);
    float* inner = inner_scratch.get<float>(kChunk * 2 * width);
    float* hidden = hidden_scratch.get<float>(kChunk * width);
    float* out = out_scratch.get<float>(kChunk * dim);
    for (int64_t expert = 0, start = 0; expert < num_experts; ++expert)
        for (; start < ends[expert];) {
            const int64_t left = ends[expert] - start, count = left < kChunk ? left : kChunk;
            for (int64_t m = 0; m < count; ++m)
                std::memcpy(rows + m * dim, x + order[start + m] / per_row * dim, dim * sizeof(float));
            (*gate)(expert, rows, inner, count);
            if (up) (*up)(expert, rows, inner + count * width, count);
            const int64_t stride = up ? width : 2 * width;
            silu_mul(inner, stride, up ? inner + count * width : inner + width, stride, hidden, count, width);
            (*down)(expert, hidden, out, count);
            for (int64_t m = 0; m < count; ++m) {
                const int64_t place = order[start + m];
                const float share = gates[place];
                float* to = y + place / per_row * dim;
                for (int64_t i = 0; i < dim; ++i) to[i] += share * out[m * dim + i];
            }
            start += count;
        }
}

// The rule by which a router's logits choose experts.
struct Rule {
    int64_t num_experts, per_row, num_groups, groups_per_row;
    int32_t is_sigmoid, is_normalized;
    float scaling;
};

// Experts of each row, the likeliest first, and their gates: `route` of models/experts.py.
void route(const float* logits, const float* bias, const Rule* rule, int64_t num_rows, int64_t* ids, float* gates) {
    const int64_t num = rule->num_experts, of_group = num / rule->num_groups;
    float *scores = rows_scratch.get<float>(2 * round_up(num, kLanes)), *wanted = scores + round_up(num, kLanes);
    int64_t *groups = order_scratch.get<int64_t>(rule->num_groups + 2), *pair = groups + rule->num_groups;
    float* of_groups = out_scratch.get<float>(rule->num_groups);
    for (int64_t row = 0; row < num_rows; ++row, logits += num, ids += rule->per_row, gates += rule->per_row) {
        score(logits, num, rule->is_sigmoid, scores);
        for (int64_t i = 0; i < num; ++i) wanted[i] = scores[i] + (bias ? bias[i] : 0.0f);
        if (rule->num_groups > 1) {  // experts of other groups are excluded
            for (int64_t group = 0; group < rule->num_groups; ++group) {
                const float* own = wanted + group * of_group;
                largest(own, of_group, 2, pair);
                of_groups[group] = own[pair[0]] + (of_group > 1 ? own[pair[1]] : 0.0f);
            }
            largest(of_groups, rule->num_groups, rule->num_groups, groups);
            for (int64_t i = rule->groups_per_row; i < rule->num_groups; ++i)
                for (int64_t j = 0; j < of_group; ++j) wanted[groups[i] * of_group + j] = -INFINITY;
        }
        largest(wanted, num, rule->per_row, ids);
        float sum = rule->is_sigmoid ? 1e-20f : 0.0f;
        for (int64_t i = 0; i < rule->per_row; ++i) sum += scores[ids[i]];
        for (int64_t i = 0; i < rule->per_row; ++i)
            gates[i] = scores[ids[i]] / (rule->is_normalized ? sum : 1.0f) * rule->scaling;
    }
}
}
