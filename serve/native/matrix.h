// Products of a few rows with packed weights. A row's numbers never depend on how many rows there are.
//
// A matrix of N outputs and K inputs is packed into panels of 32 outputs (the last one of 16 or 32); a panel is K lanes
// deep and is read in order, once for up to twelve rows. Each output of a row is one sum over K in one order, whatever the number of
// rows: row-independence to the bit, across batch sizes too.
#pragma once
#include <vector>

#include "vector.h"

namespace calm {

enum Kind : int32_t { FP32 = 0, BF16 = 1, INT8 = 2 };
constexpr int PANEL = 32;
constexpr int MOST_ROWS = 12;  // of a tile: what 32 registers hold
constexpr int FEW_ROWS = 6;    // then two panels go side by side
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
                for (int k = 0; k < inputs; k++)
                    if (!(std::fabs(row[k]) <= top)) top = std::fabs(row[k]);  // NaN stays
                step = top == 0.0f ? 1.0f : std::isfinite(top) ? top / LEVELS : NAN;
                scale[n] = step;
            }
            for (int k = 0; k < inputs; k++) {
                char* lane = panel + ((int64_t)(k / per) * width + (n - start)) * 4;
                if (kind == FP32) {
                    std::memcpy(lane, row + k, 4);
                } else if (kind == BF16) {
                    ((bf16*)lane)[k % 2] = to_bf16(row[k]);
                } else {
                    int32_t q = step == step ? (int32_t)std::nearbyint(row[k] / step) : 0;
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
            to_bf16(x, inputs, (bf16*)out);
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
                __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)whole_q);
                std::memcpy(to + k, &bytes, W);
#else
                for (int j = 0; j < W; j++) to[k + j] = (uint8_t)whole_q[j];
#endif
            }
            for (; k < inputs; k++) to[k] = (uint8_t)((int32_t)std::nearbyint(x[k] * steps) + 128);
        }
    }
};

// COUNT rows times P neighbouring panels of V vectors each.
template <class T, int COUNT, int V, int P>
static void tile(const Rows& x, int first, const Matrix& w, int start, float* out, int64_t stride) {
    const int depth = x.depth;
    const int32_t *row = x.row(first), *panel = (const int32_t*)w.packed + (int64_t)start * depth;
    typename T::Sum sums[COUNT][P * V];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < P * V; v++) sums[r][v] = typename T::Sum{};
    for (int k = 0; k < depth; k++) {
        vi weights[P * V];
        for (int v = 0; v < P * V; v++)
            weights[v] = loadi(panel + ((int64_t)(v / V) * depth + k) * V * W + v % V * W);
        for (int r = 0; r < COUNT; r++) {
            const vi number = broadcast(row[(int64_t)r * depth + k]);
            for (int v = 0; v < P * V; v++) sums[r][v] = T::dot(number, weights[v], sums[r][v]);
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < P * V; v++) {
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

template <class T, int V, int P>
static void tile_of(int count, const Rows& x, int first, const Matrix& w, int start, float* out, int64_t stride) {
    switch (count) {
        case 1: return tile<T, 1, V, P>(x, first, w, start, out, stride);
        case 2: return tile<T, 2, V, P>(x, first, w, start, out, stride);
        case 3: return tile<T, 3, V, P>(x, first, w, start, out, stride);
        case 4: return tile<T, 4, V, P>(x, first, w, start, out, stride);
        case 5: return tile<T, 5, V, P>(x, first, w, start, out, stride);
        case 6: return tile<T, 6, V, P>(x, first, w, start, out, stride);
    }
    if constexpr (P == 1) switch (count) {
            case 7: return tile<T, 7, V, P>(x, first, w, start, out, stride);
            case 8: return tile<T, 8, V, P>(x, first, w, start, out, stride);
            case 9: return tile<T, 9, V, P>(x, first, w, start, out, stride);
            case 10: return tile<T, 10, V, P>(x, first, w, start, out, stride);
            case 11: return tile<T, 11, V, P>(x, first, w, start, out, stride);
            case 12: return tile<T, 12, V, P>(x, first, w, start, out, stride);
        }
}

template <class T>
static void product_of(const Rows& x, const Matrix& w, float* out, int64_t stride) {
    const int chunks = groups(x.count, MOST_ROWS), abreast = x.count <= FEW_ROWS ? 2 : 1;
    for (int start = 0; start < w.outputs;) {
        const bool wide = panel_width(w.outputs, start) == PANEL;
        const bool pair = wide && abreast == 2 && start + 2 * PANEL <= whole(w.outputs);
        for (int first = 0, left = x.count, c = chunks; left; c--) {
            const int count = groups(left, c);
            if (pair)
                tile_of<T, 2, 2>(count, x, first, w, start, out, stride);
            else if (wide)
                tile_of<T, 2, 1>(count, x, first, w, start, out, stride);
            else
                tile_of<T, 1, 1>(count, x, first, w, start, out, stride);
            first += count, left -= count;
        }
        start += pair ? 2 * PANEL : PANEL;
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
