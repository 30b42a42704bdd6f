// Whole sources through the encoder, and the cross-attention K/V of every decoder layer from what it says of them.
// Sources stand one behind another without padding; a token reads its own source alone, so that what a source becomes
// depends on nobody, to the bit.
#pragma once
#include "layers.h"

namespace calm {

struct EncoderLayer {
    Matrix qkv, o, up, down;  // norms are folded into what they precede
};

struct Encoder {
    int32_t layers, heads, d_model, d_kv, d_ff, kind, cache_kind, activation, gated, sources, embed_kind, cross_layers;
    float eps;
    const EncoderLayer* layer;
    const void* embed;    // vocabulary x d_model, fp32 or bf16
    const float* bias;    // heads x (2 sources - 1 + 16), by key position minus query position, the smallest first
    const Matrix* cross;  // of each decoder layer: keys, then values; the last norm is folded in
};

struct EncoderEngine {
    Encoder m;
    Scratch scratch;
    std::vector<int32_t> lanes;
};

constexpr int TOGETHER = 256;  // tokens that are enough to make reading the weights cheap
constexpr int QUERIES = 4;     // that share a reading of keys and values

// Attention of one source's tokens to each other. qkv: length x 3 inner; mixed: length x inner.
template <class T>
static void attend_within(EncoderEngine& e, const float* qkv, int length, float* mixed) {
    const Encoder& m = e.m;
    const HeadShape shape{length, m.d_kv, T::PER};
    const int inner = m.heads * m.d_kv;
    const int64_t stride = 3 * inner;
    int32_t* keys = Scratch::need(e.lanes, shape.key_lanes() + shape.value_lanes());
    int32_t* values = keys + shape.key_lanes();
    const HeadScratch at = scratch_of(m, e.scratch, length, QUERIES);
    for (int h = 0; h < m.heads; h++) {
        const float* head = qkv + h * m.d_kv;
        const float* bias = m.bias + (int64_t)h * (2 * m.sources - 1 + W) + m.sources - 1;
        for (int t = 0; t < length; t++) {
            put_key<T>(keys, shape, t, head + t * stride + inner);
            put_value<T>(values, shape, t, head + t * stride + 2 * inner);
        }
        float* out = mixed + h * m.d_kv;
        int t = 0;
        for (; t + QUERIES <= length; t += QUERIES)
            attend_together<T, QUERIES>(head + t * stride, stride, keys, values, shape, length, bias - t, at,
                                        out + (int64_t)t * inner, inner);
        for (; t < length; t++)
            attend_together<T, 1>(head + t * stride, stride, keys, values, shape, length, bias - t, at,
                                  out + (int64_t)t * inner, inner);
    }
}

static void put_hidden(EncoderEngine& e, int count) {
    const Encoder& m = e.m;
    e.scratch.x.shape(m.kind, count, m.d_model);
    for (int i = 0; i < count; i++) put_normed(m, e.scratch, i, e.scratch.residual.data() + (int64_t)i * m.d_model);
}

static void encoder_layer(EncoderEngine& e, const EncoderLayer& layer, const int32_t* lengths, int sources, int count) {
    const Encoder& m = e.m;
    Scratch& s = e.scratch;
    const int inner = m.heads * m.d_kv;
    float *qkv = Scratch::need(s.kv, (size_t)count * 3 * inner), *mixed = Scratch::need(s.mixed, (size_t)count * inner);
    put_hidden(e, count);
    product(s.x, layer.qkv, qkv, 3 * inner);
    for (int64_t i = 0, first = 0; i < sources; first += lengths[i++]) {
        const float* own = qkv + first * 3 * inner;
        m.cache_kind == FP32 ? attend_within<Fp32>(e, own, lengths[i], mixed + first * inner)
                             : attend_within<Bf16>(e, own, lengths[i], mixed + first * inner);
    }
    s.x.shape(m.kind, count, inner);
    for (int i = 0; i < count; i++) s.x.put(i, mixed + (int64_t)i * inner);
    add_product(m, s, layer.o);
    feed_forward(m, s, layer, count);
}

// Source i's keys and values are layers x heads x length x d_kv.
static void put_cross(EncoderEngine& e, const int32_t* lengths, int sources, int count, float* const* keys,
                      float* const* values) {
    const Encoder& m = e.m;
    const int inner = m.heads * m.d_kv;
    float* kv = Scratch::need(e.scratch.kv, (size_t)count * 2 * inner);
    put_hidden(e, count);
    for (int layer = 0; layer < m.cross_layers; layer++) {
        product(e.scratch.x, m.cross[layer], kv, 2 * inner);
        const float* row = kv;
        for (int i = 0; i < sources; i++)
            for (int t = 0; t < lengths[i]; t++, row += 2 * inner)
                for (int h = 0; h < m.heads; h++) {
                    const int64_t to = (((int64_t)layer * m.heads + h) * lengths[i] + t) * m.d_kv;
                    std::memcpy(keys[i] + to, row + h * m.d_kv, (size_t)m.d_kv * 4);
                    std::memcpy(values[i] + to, row + inner + h * m.d_kv, (size_t)m.d_kv * 4);
                }
    }
}

// ``tokens``: of all sources, one behind another.
static void encode(EncoderEngine& e, const int32_t* tokens, const int32_t* lengths, int sources, float* const* keys,
                   float* const* values) {
    const Encoder& m = e.m;
    while (sources) {
        int some = 0, count = 0;
        while (some < sources && count < TOGETHER) count += lengths[some++];
        float* residual = Scratch::need(e.scratch.residual, (size_t)count * m.d_model);
        for (int i = 0; i < count; i++) put_embedding(m, tokens[i], residual + (int64_t)i * m.d_model);
        for (int layer = 0; layer < m.layers; layer++) encoder_layer(e, m.layer[layer], lengths, some, count);
        put_cross(e, lengths, some, count, keys, values);
        tokens += count, lengths += some, sources -= some, keys += some, values += some;
    }
}

}  // namespace calm
