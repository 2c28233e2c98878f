// Dense layers of a decoder, for packed tokens. It calls the kernels of other files by pointers from the caller, so its
// results are theirs, bit for bit. Uses no header of torch or Python.

#include <cstdint>

namespace {

using RmsNorm = void (*)(const float*, const float*, float*, int64_t, int64_t, float);
using Rotate = void (*)(
    float*, int64_t, int64_t, const float*, const float*, const float*, int64_t, int64_t, int64_t, int64_t, float);
using SiluMul = void (*)(const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t);
using Attend = void (*)(
    const float*, int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, int64_t, int64_t,
    void*, void*, const int64_t*, const void*, int64_t, const int64_t*, const int64_t*);
using Multiply = void (*)(const float*, const void*, const float*, float*, int64_t, int64_t, int64_t, int);
using MultiplyScaled =
    void (*)(const float*, const void*, const float*, const float*, float*, int64_t, int64_t, int64_t, int);

// The structures are those of `linear.py` and `stack.py`.
struct Matrix {
    void* multiply;
    const void* weights;
    const float *scales, *bias;  // null scales: `multiply` takes none
    int64_t n, k;

    void operator()(const float* x, float* y, int64_t m, bool add) const {
        if (scales) reinterpret_cast<MultiplyScaled>(multiply)(x, weights, scales, bias, y, m, n, k, add);
        else reinterpret_cast<Multiply>(multiply)(x, weights, bias, y, m, n, k, add);
    }
};

struct Layer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;
    Matrix qkv, o, gate_up, down;
};

struct Sizes {
    int64_t num_layers, width, num_heads, num_kv_heads, head_dim, rotary_dim, inner;
};

struct Kernels {
    RmsNorm rms_norm;
    Rotate rotate;
    SiluMul silu_mul;
};

// The runs that the tokens of this step see, as in `attention.cpp`, and the keys and values of the layers.
struct Attention {
    Attend attend;
    const int64_t* slots;
    const void* tasks;
    int64_t num_tasks;
    const int64_t *members, *blocks;
    char *keys, *values;
    int64_t layer_bytes;
};

}  // namespace

// x [rows, width] becomes the sum of the residual stream. `room` holds consecutive arrays with rows of: width; queries,
// keys and values; heads; 2 inner; inner.
extern "C" void run_layers(
    const Sizes* sizes, const Kernels* kernels, const Layer* layers, const Attention* attention, float eps,
    const float* cosine, const float* sine, int64_t table_stride, float* x, int64_t rows, float* room) {
    const Sizes& s = *sizes;
    const int64_t q_size = s.num_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim, stride = q_size + 2 * kv_size;
    float *normed = room, *q = normed + rows * s.width, *k = q + q_size, *v = k + kv_size, *heads = q + rows * stride;
    float *gate = heads + rows * q_size, *inner = gate + rows * 2 * s.inner;
    for (int64_t i = 0; i < s.num_layers; ++i) {
        const Layer& layer = layers[i];
        kernels->rms_norm(x, layer.input_norm, normed, rows, s.width, eps);
        layer.qkv(normed, q, rows, false);
        kernels->rotate(
            q, stride, s.num_heads, layer.q_norm, cosine, sine, table_stride, rows, s.head_dim, s.rotary_dim, eps);
        kernels->rotate(
            k, stride, s.num_kv_heads, layer.k_norm, cosine, sine, table_stride, rows, s.head_dim, s.rotary_dim, eps);
        attention->attend(
            q, stride, k, stride, v, stride, heads, rows, s.num_heads, s.num_kv_heads, s.head_dim,
            attention->keys + i * attention->layer_bytes, attention->values + i * attention->layer_bytes,
            attention->slots, attention->tasks, attention->num_tasks, attention->members, attention->blocks);
        layer.o(heads, x, rows, true);
        kernels->rms_norm(x, layer.post_norm, normed, rows, s.width, eps);
        layer.gate_up(normed, gate, rows, false);
        kernels->silu_mul(gate, 2 * s.inner, gate + s.inner, 2 * s.inner, inner, rows, s.inner);
        layer.down(inner, x, rows, true);
    }
}
