// Products of a few rows with packed weights. A row's numbers never depend on how many rows there are.
//
// A matrix of N outputs and K inputs is packed into panels of up to 64 outputs; a panel is K lanes deep and 64 lanes
// wide, so that it is read once, in order. Each output of a row is one sum over K in one order, whatever the number of
// rows: row-independence to the bit, across batch sizes too.
#pragma once
#include <vector>

#include "vector.h"

namespace calm {

enum Kind : int32_t { FP32 = 0, BF16 = 1, INT8 = 2 };
constexpr int PANEL = 64;
constexpr int LEVELS = 127;

struct Matrix {
    const void* packed;         // lanes
    const float* scale;         // int8: of each output
    const int32_t* correction;  // int8: 128 times the sum of each output's weights
    int32_t outputs, inputs;
};

static INLINE int per_lane(int kind) { return kind == FP32 ? 1 : kind == BF16 ? 2 : 4; }
static INLINE int64_t packed_lanes(int outputs, int inputs, int kind) {
    return (int64_t)whole(outputs) * groups(inputs, per_lane(kind));
}
static INLINE int panel_width(int outputs, int start) {
    int left = whole(outputs) - start;
    return left < PANEL ? left : PANEL;
}

// Pack fp32 weights (outputs x inputs, row by row).
static void pack(const float* weights, int outputs, int inputs, int kind, void* packed, float* scale,
                 int32_t* correction) {
    const int per = per_lane(kind), depth = groups(inputs, per);
    std::memset(packed, 0, packed_lanes(outputs, inputs, kind) * 4);
    for (int start = 0; start < whole(outputs); start += PANEL) {
        const int width = panel_width(outputs, start);
        char* panel = (char*)packed + (int64_t)start * depth * 4;
        for (int n = start; n < start + width && n < outputs; n++) {
            const float* row = weights + (int64_t)n * inputs;
            float step = 1.0f;
            int32_t total = 0;
            if (kind == INT8) {
                float top = 0.0f;
                for (int k = 0; k < inputs; k++) top = std::fabs(row[k]) > top ? std::fabs(row[k]) : top;
                step = top > 0.0f ? top / LEVELS : 1.0f;
                scale[n] = step;
            }
            for (int k = 0; k < inputs; k++) {
                char* lane = panel + ((int64_t)(k / per) * width + (n - start)) * 4;
                if (kind == FP32) {
                    std::memcpy(lane, row + k, 4);
                } else if (kind == BF16) {
                    ((bf16*)lane)[k % 2] = to_bf16(row[k]);
                } else {
                    int32_t q = (int32_t)std::nearbyint(row[k] / step);
                    q = q > LEVELS ? LEVELS : q < -LEVELS ? -LEVELS : q;
                    ((int8_t*)lane)[k % 4] = (int8_t)q;
                    total += q;
                }
            }
            if (kind == INT8) correction[n] = 128 * total;
        }
    }
}

// Rows of activations in the form that a product reads: lanes, padded with zeros; int8 with one scale a row.
struct Rows {
    int kind = FP32, count = 0, inputs = 0, depth = 0;
    std::vector<int32_t> lanes;
    std::vector<float> scale;

    void shape(int new_kind, int new_count, int new_inputs) {
        kind = new_kind, count = new_count, inputs = new_inputs;
        depth = groups(inputs, per_lane(kind));
        if (lanes.size() < (size_t)count * depth) lanes.resize((size_t)count * depth);
        if (scale.size() < (size_t)count) scale.resize(count);
    }
    int32_t* row(int i) { return lanes.data() + (size_t)i * depth; }
    const int32_t* row(int i) const { return lanes.data() + (size_t)i * depth; }

    // A row whose numbers are not all finite gets the scale NaN: so do all its products, and nobody else's.
    void put(int i, const float* x) {
        int32_t* out = row(i);
        if (kind == FP32) {
            std::memcpy(out, x, (size_t)inputs * 4);
        } else if (kind == BF16) {
            out[depth - 1] = 0;
            bf16* to = (bf16*)out;
            int k = 0;
#if defined(__AVX512BF16__)
            for (; k + W <= inputs; k += W) {
                __m256bh half = _mm512_cvtneps_pbh((__m512)load(x + k));
                std::memcpy(to + k, &half, 32);
            }
#endif
            for (; k < inputs; k++) to[k] = to_bf16(x[k]);
        } else {
            vf tops{}, odd{};
            int k = 0;
            for (; k + W <= inputs; k += W) {
                vf v = load(x + k);
                odd += v - v;  // NaN where a number is not finite
                tops = larger((vf)((vi)v & broadcast(0x7fffffff)), tops);
            }
            float top = largest(tops), wrong = sum(odd);
            for (; k < inputs; k++) wrong += x[k] - x[k], top = std::fabs(x[k]) > top ? std::fabs(x[k]) : top;
            uint8_t* to = (uint8_t*)out;
            out[depth - 1] = (int32_t)0x80808080;
            if (wrong != 0.0f) {
                scale[i] = NAN;
                std::memset(to, 128, inputs);
                return;
            }
            scale[i] = top > 0.0f ? top / LEVELS : 1.0f;
            const float steps = top > 0.0f ? LEVELS / top : 1.0f;
            const vf magic = broadcast(12582912.0f);
            k = 0;
            for (; k + W <= inputs; k += W) {
                vf q = multiply_add(load(x + k), broadcast(steps), magic) - magic;
                vi whole_q = __builtin_convertvector(q, vi) + broadcast(128);
#if defined(__AVX512F__)
                __m128i bytes = _mm512_cvtepi32_epi8((__m512i)whole_q);
                std::memcpy(to + k, &bytes, W);
#else
                for (int j = 0; j < W; j++) to[k + j] = (uint8_t)whole_q[j];
#endif
            }
            for (; k < inputs; k++) to[k] = (uint8_t)((int32_t)std::nearbyint(x[k] * steps) + 128);
        }
    }
};

// COUNT rows times a panel of V vectors.
template <class T, int COUNT, int V>
static INLINE void tile(const int32_t* const* rows, const int32_t* panel, int depth, typename T::Sum (&sums)[COUNT][V]) {
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < V; v++) sums[r][v] = typename T::Sum{};
    for (int k = 0; k < depth; k++) {
        vi weights[V];
        for (int v = 0; v < V; v++) weights[v] = loadi(panel + (int64_t)k * V * W + v * W);
        for (int r = 0; r < COUNT; r++) {
            const vi x = broadcast(rows[r][k]);
            for (int v = 0; v < V; v++) sums[r][v] = T::dot(x, weights[v], sums[r][v]);
        }
    }
}

template <class T, int COUNT, int V>
static void tile_out(const Rows& x, int first, const Matrix& w, int start, float* out, int64_t stride) {
    const int32_t* rows[COUNT];
    for (int r = 0; r < COUNT; r++) rows[r] = x.row(first + r);
    typename T::Sum sums[COUNT][V];
    tile<T, COUNT, V>(rows, (const int32_t*)w.packed + (int64_t)start * x.depth, x.depth, sums);
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < V; v++) {
            const int n = start + v * W;
            vf value;
            if constexpr (T::PER == 4) {
                const vi exact = sums[r][v] - loadi(w.correction + n);
                value = __builtin_convertvector(exact, vf) * (broadcast(x.scale[first + r]) * load(w.scale + n));
            } else {
                value = sums[r][v];
            }
            float* to = out + (first + r) * stride + n;
            if (n + W <= w.outputs)
                store(to, value);
            else
                for (int j = 0; n + j < w.outputs; j++) to[j] = value[j];
        }
}

template <class T, int V>
static void panel_out(const Rows& x, const Matrix& w, int start, float* out, int64_t stride) {
    for (int first = 0, left = x.count; left;) {
        const int chunks = groups(left, 6), count = groups(left, chunks);
        switch (count) {
            case 1: tile_out<T, 1, V>(x, first, w, start, out, stride); break;
            case 2: tile_out<T, 2, V>(x, first, w, start, out, stride); break;
            case 3: tile_out<T, 3, V>(x, first, w, start, out, stride); break;
            case 4: tile_out<T, 4, V>(x, first, w, start, out, stride); break;
            case 5: tile_out<T, 5, V>(x, first, w, start, out, stride); break;
            default: tile_out<T, 6, V>(x, first, w, start, out, stride);
        }
        first += count, left -= count;
    }
}

template <class T>
static void product_of(const Rows& x, const Matrix& w, float* out, int64_t stride) {
    for (int start = 0; start < w.outputs; start += PANEL) switch (panel_width(w.outputs, start) / W) {
            case 1: panel_out<T, 1>(x, w, start, out, stride); break;
            case 2: panel_out<T, 2>(x, w, start, out, stride); break;
            case 3: panel_out<T, 3>(x, w, start, out, stride); break;
            default: panel_out<T, 4>(x, w, start, out, stride);
        }
}

// out[i][n] = rows[i] . weights[n]; out has ``stride`` numbers a row.
static void product(const Rows& x, const Matrix& w, float* out, int64_t stride) {
    if (!x.count) return;
    if (x.kind == FP32)
        product_of<Fp32>(x, w, out, stride);
    else if (x.kind == BF16)
        product_of<Bf16>(x, w, out, stride);
    else
        product_of<Int8>(x, w, out, stride);
}

}  // namespace calm
