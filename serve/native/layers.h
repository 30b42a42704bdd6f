// One decoder layer for the rows of a wave, and the K/V of layers that rows skip.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "model.h"

namespace calm {

// Working memory of one engine, as large as its largest batch has needed.
struct Scratch {
    Rows x, few;
    std::vector<float> query, kv, mixed, residual, wide, out, normed, logits, scores, mixed_head;
    std::vector<int32_t> query_lanes, share_lanes, written;
    std::vector<int> order;

    template <class T>
    static T* need(std::vector<T>& memory, size_t count) {
        if (memory.size() < count) memory.resize(count);
        return memory.data();
    }
};

static INLINE HeadShape own_shape(const Model& m) { return {m.positions, m.d_kv, per_lane(m.cache_kind)}; }
static INLINE HeadShape cross_shape(const Model& m) { return {m.sources, m.d_kv, per_lane(m.cross_kind)}; }
static INLINE int64_t head_at(const Model& m, int layer, int slot, int head) {
    return ((int64_t)(layer - 1) * m.slots + slot) * m.heads + head;
}

template <class M>
static void put_embedding(const M& m, int32_t token, float* out) {
    const int64_t row = (int64_t)token * m.d_model;
    if (m.embed_kind == FP32)
        std::memcpy(out, (const float*)m.embed + row, (size_t)m.d_model * 4);
    else
        for (int k = 0; k < m.d_model; k++) out[k] = of_bf16(((const bf16*)m.embed)[row + k]);
}

// x / sqrt(mean x^2 + eps)
static void normalise(const float* x, int count, float eps, float* out) {
    vf squares{};
    int k = 0;
    for (; k + W <= count; k += W) {
        const vf v = load(x + k);
        squares = multiply_add(v, v, squares);
    }
    float total = sum(squares);
    for (; k < count; k++) total += x[k] * x[k];
    const float scale = 1.0f / std::sqrt(total / count + eps);
    for (k = 0; k + W <= count; k += W) store(out + k, load(x + k) * broadcast(scale));
    for (; k < count; k++) out[k] = x[k] * scale;
}

// Row i of the left factor becomes the normalised x. Here and below ``m`` is a Model or an Encoder.
template <class M>
static void put_normed(const M& m, Scratch& s, int i, const float* x) {
    float* normed = Scratch::need(s.normed, m.d_model);
    normalise(x, m.d_model, m.eps, normed);
    s.x.put(i, normed);
}

template <class T>
static void write_kv_as(const Model& m, int layer, int slot, const float* kv) {
    const HeadShape shape = own_shape(m);
    const int step = m.step[slot], inner = m.heads * m.d_kv;
    for (int h = 0; h < m.heads; h++) {
        const int64_t at = head_at(m, layer, m.home[slot], h);
        put_key<T>(m.keys + at * shape.key_lanes(), shape, step, kv + h * m.d_kv);
        put_value<T>(m.values + at * shape.value_lanes(), shape, step, kv + inner + h * m.d_kv);
    }
}
static void write_kv(const Model& m, int layer, int slot, const float* kv) {
    m.cache_kind == FP32 ? write_kv_as<Fp32>(m, layer, slot, kv) : write_kv_as<Bf16>(m, layer, slot, kv);
}

// For so many queries at a time.
template <class M>
static HeadScratch scratch_of(const M& m, Scratch& s, int positions, int queries = 1) {
    const size_t longest = (size_t)whole(positions) * queries;
    return {Scratch::need(s.scores, longest), Scratch::need(s.query_lanes, m.d_kv * queries),
            Scratch::need(s.share_lanes, longest), Scratch::need(s.mixed_head, whole(m.d_kv) * queries)};
}

static void attend_sources_coarsely(const Model& m, Scratch& s, int layer, const int32_t* slots, int count) {
    const HeadShape shape = cross_shape(m);
    const HeadScratch at = scratch_of(m, s, shape.positions);
    for (int i = 0; i < count; i++)
        for (int h = 0; h < m.heads; h++) {
            const int home = m.home[slots[i]];
            const int64_t place = head_at(m, layer, home, h), where = ((int64_t)i * m.heads + h) * m.d_kv;
            if (m.source_length[home] <= 0) {  // a slot without a source
                std::memset(s.mixed.data() + where, 0, (size_t)m.d_kv * 4);
                continue;
            }
            attend_coarse(s.query.data() + where, m.cross_keys + place * shape.key_lanes(),
                          m.cross_values + place * shape.value_lanes(),
                          Coarse::at(m.coarse + place * Coarse::lanes(shape), shape), shape,
                          m.source_length[home], at, s.mixed.data() + where);
        }
}

template <class T>
static void attend_rows_as(const Model& m, Scratch& s, int layer, const int32_t* slots, int count, bool cross) {
    const HeadShape shape = cross ? cross_shape(m) : own_shape(m);
    const int32_t *keys = cross ? m.cross_keys : m.keys, *values = cross ? m.cross_values : m.values;
    const int inner = m.heads * m.d_kv;
    const HeadScratch at = scratch_of(m, s, shape.positions);
    for (int i = 0; i < count; i++) {
        const int home = m.home[slots[i]], step = m.step[slots[i]];
        const int length = cross ? m.source_length[home] : step + 1;
        if (length <= 0) {  // a slot without a source
            std::memset(s.mixed.data() + (int64_t)i * inner, 0, (size_t)inner * 4);
            continue;
        }
        for (int h = 0; h < m.heads; h++) {
            const int64_t place = head_at(m, layer, home, h);
            const float* bias = cross ? nullptr : m.bias + (int64_t)h * (m.positions + W) + m.positions - 1 - step;
            attend<T>(s.query.data() + (int64_t)i * inner + h * m.d_kv, keys + place * shape.key_lanes(),
                      values + place * shape.value_lanes(), shape, length, bias, at,
                      s.mixed.data() + (int64_t)i * inner + h * m.d_kv);
        }
    }
}
static void attend_rows(const Model& m, Scratch& s, int layer, const int32_t* slots, int count, bool cross) {
    if (cross && m.cross_kind == INT8) return attend_sources_coarsely(m, s, layer, slots, count);
    (cross ? m.cross_kind : m.cache_kind) == FP32
        ? attend_rows_as<Fp32>(m, s, layer, slots, count, cross)
        : attend_rows_as<Bf16>(m, s, layer, slots, count, cross);
}

static INLINE vf activated(int activation, vf x) {
    if (activation == RELU) return larger(x, x - x);  // NaN stays NaN
    vf inner = x;
    if (activation == GELU_NEW) {
        const vf cube = x * x * x;
        inner = broadcast(1.5957691216f) * multiply_add(broadcast(0.044715f), cube, x);
    }
    if (activation == GELU) {
        for (int i = 0; i < W; i++) inner[i] = x[i] * 0.5f * (1.0f + std::erf(x[i] * 0.70710678f));
        return inner;
    }
    return x / (broadcast(1.0f) + exponential(-inner));  // x sigmoid(inner)
}

// residual += weights . x, for all rows
template <class M>
static void add_product(const M& m, Scratch& s, const Matrix& weights) {
    const int count = s.x.count;
    float* out = Scratch::need(s.out, (size_t)count * m.d_model);
    product(s.x, weights, out, m.d_model);
    float* residual = s.residual.data();
    for (int64_t k = 0; k < (int64_t)count * m.d_model; k++) residual[k] += out[k];
}

template <class M, class L>
static void feed_forward(const M& m, Scratch& s, const L& layer, int count) {
    const int wide = layer.up.outputs, d_ff = m.d_ff;
    float* up = Scratch::need(s.wide, (size_t)count * wide + W);
    s.x.shape(m.kind, count, m.d_model);
    for (int i = 0; i < count; i++) put_normed(m, s, i, s.residual.data() + (int64_t)i * m.d_model);
    product(s.x, layer.up, up, wide);
    s.x.shape(m.kind, count, d_ff);
    for (int i = 0; i < count; i++) {
        float* row = up + (int64_t)i * wide;
        const float* other = row + d_ff;
        int k = 0;
        for (; k + W <= d_ff; k += W) {
            vf value = activated(m.activation, load(row + k));
            store(row + k, m.gated ? value * load(other + k) : value);
        }
        for (; k < d_ff; k++) {
            const float value = activated(m.activation, broadcast(row[k]))[0];
            row[k] = m.gated ? value * other[k] : value;
        }
        s.x.put(i, row);
    }
    add_product(m, s, layer.down);
}

// Layer ``layer`` on these rows: their K/V at their positions, and their hidden after it in ``residual``. Several may be
// lanes of one slot: all K/V are written before anybody reads, and a row reads none behind its own position.
static void run_layer(const Model& m, Scratch& s, int layer, const int32_t* slots, int count) {
    const Layer& weights = m.layer[layer - 1];
    const int inner = m.heads * m.d_kv, d = m.d_model;
    float* residual = Scratch::need(s.residual, (size_t)count * d);
    Scratch::need(s.query, (size_t)count * inner), Scratch::need(s.kv, (size_t)count * 2 * inner);
    Scratch::need(s.mixed, (size_t)count * inner);
    s.x.shape(m.kind, count, d);
    for (int i = 0; i < count; i++) {
        const float* hidden = m.hidden + (int64_t)slots[i] * d;
        std::memcpy(residual + (int64_t)i * d, hidden, (size_t)d * 4);
        put_normed(m, s, i, hidden);
    }
    product(s.x, weights.q, s.query.data(), inner);
    product(s.x, weights.kv, s.kv.data(), 2 * inner);
    for (int i = 0; i < count; i++) write_kv(m, layer, slots[i], s.kv.data() + (int64_t)i * 2 * inner);
    for (bool cross : {false, true}) {
        if (cross) {
            s.x.shape(m.kind, count, d);
            for (int i = 0; i < count; i++) put_normed(m, s, i, residual + (int64_t)i * d);
            product(s.x, weights.cross_q, s.query.data(), inner);
        }
        attend_rows(m, s, layer, slots, count, cross);
        s.x.shape(m.kind, count, inner);
        for (int i = 0; i < count; i++) s.x.put(i, s.mixed.data() + (int64_t)i * inner);
        add_product(m, s, cross ? weights.cross_o : weights.o);
    }
    feed_forward(m, s, weights, count);
}

// K/V of the layers above ``written`` of each row, from its hidden; a row is normalised once for all layers.
static void backfill(const Model& m, Scratch& s, const int32_t* slots, const int32_t* written, int count) {
    std::vector<int>& order = s.order;
    order.resize(count);
    for (int i = 0; i < count; i++) order[i] = i;
    std::sort(order.begin(), order.end(), [&](int a, int b) {
        return written[a] < written[b] || (written[a] == written[b] && a < b);
    });
    const int inner = m.heads * m.d_kv;
    float* kv = Scratch::need(s.kv, (size_t)count * 2 * inner);
    int rows = 0;
    while (rows < count && written[order[rows]] < m.layers) rows++;
    if (!rows) return;
    s.x.shape(m.kind, rows, m.d_model);
    for (int i = 0; i < rows; i++) put_normed(m, s, i, m.hidden + (int64_t)slots[order[i]] * m.d_model);
    for (int layer = 1; layer <= m.layers; layer++) {
        int below = 0;
        while (below < rows && written[order[below]] < layer) below++;
        s.x.count = below;
        product(s.x, m.layer[layer - 1].kv, kv, 2 * inner);
        for (int i = 0; i < below; i++) write_kv(m, layer, slots[order[i]], kv + (int64_t)i * 2 * inner);
    }
}

}  // namespace calm
