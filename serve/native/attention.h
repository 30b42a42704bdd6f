// Attention of one query over the keys and values of one head, laid out so that neither needs a transposition.
//
// Keys come in blocks of 16 positions: a block holds, for each lane of d_kv, that lane of all 16 positions side by
// side, so that 16 scores are one running sum. Values come in groups of as many positions as a lane holds: a group
// holds, for each number of d_kv, that number of its positions.
#pragma once
#include <type_traits>

#include "vector.h"

namespace calm {

// Where one head's keys or values of ``positions`` are: sizes in lanes.
struct HeadShape {
    int positions, width, per;
    int depth() const { return groups(width, per); }
    int64_t key_lanes() const { return (int64_t)groups(positions, W) * depth() * W; }
    int64_t value_lanes() const { return (int64_t)groups(positions, per) * whole(width); }
};

template <class T>
static void put_key(int32_t* keys, const HeadShape& shape, int position, const float* key) {
    int32_t* block = keys + (int64_t)(position / W) * shape.depth() * W + position % W;
    if (shape.width % T::PER) block[(int64_t)(shape.depth() - 1) * W] = 0;  // what of a lane is no number counts as one
    for (int d = 0; d < shape.width; d++)
        ((typename T::Number*)(block + (int64_t)(d / T::PER) * W))[d % T::PER] = T::round(key[d]);
}

template <class T>
static void put_value(int32_t* values, const HeadShape& shape, int position, const float* value) {
    int32_t* group = values + (int64_t)(position / T::PER) * whole(shape.width);
    if (position % T::PER == 0)  // positions that are still to come count as 0 * value: they must be numbers
        std::memset(group, 0, (size_t)shape.width * 4);
    for (int d = 0; d < shape.width; d++)
        ((typename T::Number*)(group + d))[position % T::PER] = T::round(value[d]);
}

// Lanes of some numbers, padded with zeros: a query, or probabilities.
template <class T>
static INLINE void put_lanes(int32_t* lanes, const float* numbers, int count) {
    if constexpr (T::PER == 1) {
        std::memcpy(lanes, numbers, (size_t)count * 4);
    } else {
        lanes[groups(count, T::PER) - 1] = 0;
        to_bf16(numbers, count, (bf16*)lanes);
    }
}

// How many blocks of keys or vectors of values are summed side by side: enough to hide the latency of a sum.
constexpr int ABREAST = 4;

template <class T, int BLOCKS>
static INLINE void score_blocks(const int32_t* query, const int32_t* keys, int depth, float* scores) {
    typename T::Sum sums[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) sums[b] = typename T::Sum{};
    for (int g = 0; g < depth; g++) {
        const vi q = broadcast(query[g]);
        for (int b = 0; b < BLOCKS; b++) sums[b] = T::dot(q, loadi(keys + ((int64_t)b * depth + g) * W), sums[b]);
    }
    for (int b = 0; b < BLOCKS; b++) store(scores + b * W, sums[b]);
}

template <class T, int VECTORS>
static INLINE void mix_vectors(const int32_t* shares, const int32_t* values, int count, int stride, float scale,
                               float* out) {
    typename T::Sum even[VECTORS], odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) even[v] = odd[v] = typename T::Sum{};
    int g = 0;
    for (; g + 1 < count; g += 2)
        for (int v = 0; v < VECTORS; v++) {
            even[v] = T::dot(broadcast(shares[g]), loadi(values + (int64_t)g * stride + v * W), even[v]);
            odd[v] = T::dot(broadcast(shares[g + 1]), loadi(values + (int64_t)(g + 1) * stride + v * W), odd[v]);
        }
    if (g < count)
        for (int v = 0; v < VECTORS; v++)
            even[v] = T::dot(broadcast(shares[g]), loadi(values + (int64_t)g * stride + v * W), even[v]);
    for (int v = 0; v < VECTORS; v++) store(out + v * W, (even[v] + odd[v]) * broadcast(scale));
}

// Scratch of one head: scores of whole blocks, and lanes of the query and of the shares.
struct HeadScratch {
    float* scores;
    int32_t* query;
    int32_t* shares;
    float* mixed;
};

// Scores become their exponentials relative to the largest; returns their sum. ``bias`` may be null.
static float soften(float* scores, int count, const float* bias) {
    const int blocks = groups(count, W);
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf tops = broadcast(-INFINITY);
    for (int b = 0; b < blocks; b++) {
        vf s = load(scores + b * W);
        if (bias) s += load(bias + b * W);
        s = choose(lane + broadcast(b * W) < broadcast(count), s, broadcast(-INFINITY));
        store(scores + b * W, s);
        tops = larger(s, tops);
    }
    const vf top = broadcast(largest(tops));
    vf total{};
    for (int b = 0; b < blocks; b++) {
        const vf e = exponential(load(scores + b * W) - top);
        store(scores + b * W, e);
        total += e;
    }
    return sum(total);
}

// out[0..width) = softmax(query . keys + bias) values, over positions 0..count-1. ``bias`` may be null.
template <class T>
static void attend(const float* query, const int32_t* keys, const int32_t* values, const HeadShape& shape, int count,
                   const float* bias, const HeadScratch& at, float* out) {
    const int depth = shape.depth(), blocks = groups(count, W), stride = whole(shape.width);
    put_lanes<T>(at.query, query, shape.width);
    int b = 0;
    for (; b + ABREAST <= blocks; b += ABREAST)
        score_blocks<T, ABREAST>(at.query, keys + (int64_t)b * depth * W, depth, at.scores + b * W);
    for (; b < blocks; b++) score_blocks<T, 1>(at.query, keys + (int64_t)b * depth * W, depth, at.scores + b * W);
    const float scale = 1.0f / soften(at.scores, count, bias);
    put_lanes<T>(at.shares, at.scores, count);
    const int shares = groups(count, T::PER);
    int v = 0;
    for (; v + ABREAST <= stride / W; v += ABREAST)
        mix_vectors<T, ABREAST>(at.shares, values + v * W, shares, stride, scale, at.mixed + v * W);
    for (; v < stride / W; v++) mix_vectors<T, 1>(at.shares, values + v * W, shares, stride, scale, at.mixed + v * W);
    std::memcpy(out, at.mixed, (size_t)shape.width * 4);
}

// The same of Q queries that follow one another: keys and values are read once for all of them, and what each becomes does
// not depend on Q. ``bias`` is the first query's; that of the next one begins a number earlier. Rows of ``queries`` and
// ``out`` are so many numbers apart.
template <class T, int Q>
static void attend_together(const float* queries, int64_t apart, const int32_t* keys, const int32_t* values,
                            const HeadShape& shape, int count, const float* bias, const HeadScratch& at, float* out,
                            int64_t out_apart) {
    const int depth = shape.depth(), blocks = groups(count, W), stride = whole(shape.width);
    const int shares = groups(count, T::PER), row = blocks * W;
    for (int q = 0; q < Q; q++) put_lanes<T>(at.query + q * depth, queries + q * apart, shape.width);
    auto score = [&](int b, auto abreast) {
        constexpr int B = decltype(abreast)::value;
        typename T::Sum sums[B][Q];
        for (int i = 0; i < B * Q; i++) sums[i / Q][i % Q] = typename T::Sum{};
        for (int g = 0; g < depth; g++)
            for (int i = 0; i < B; i++) {
                const vi key = loadi(keys + ((int64_t)(b + i) * depth + g) * W);
                for (int q = 0; q < Q; q++) sums[i][q] = T::dot(broadcast(at.query[q * depth + g]), key, sums[i][q]);
            }
        for (int i = 0; i < B; i++)
            for (int q = 0; q < Q; q++) store(at.scores + q * row + (b + i) * W, sums[i][q]);
    };
    int b = 0;
    for (; b + 2 <= blocks; b += 2) score(b, std::integral_constant<int, 2>{});
    if (b < blocks) score(b, std::integral_constant<int, 1>{});
    float scale[Q];
    for (int q = 0; q < Q; q++) {
        scale[q] = 1.0f / soften(at.scores + q * row, count, bias - q);
        put_lanes<T>(at.shares + q * shares, at.scores + q * row, count);
    }
    auto mix = [&](int v, auto vectors) {
        constexpr int V = decltype(vectors)::value;
        typename T::Sum sums[Q][V];
        for (int i = 0; i < Q * V; i++) sums[i / V][i % V] = typename T::Sum{};
        for (int g = 0; g < shares; g++) {
            vi value[V];
            for (int i = 0; i < V; i++) value[i] = loadi(values + (int64_t)g * stride + (v + i) * W);
            for (int q = 0; q < Q; q++) {
                const vi share = broadcast(at.shares[q * shares + g]);
                for (int i = 0; i < V; i++) sums[q][i] = T::dot(share, value[i], sums[q][i]);
            }
        }
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < V; i++) store(at.mixed + q * stride + (v + i) * W, sums[q][i] * broadcast(scale[q]));
    };
    int v = 0;
    for (; v + ABREAST <= stride / W; v += ABREAST) mix(v, std::integral_constant<int, ABREAST>{});
    for (; v < stride / W; v++) mix(v, std::integral_constant<int, 1>{});
    for (int q = 0; q < Q; q++) std::memcpy(out + q * out_apart, at.mixed + q * stride, (size_t)shape.width * 4);
}

// Keys and values of one head in int8: a scale for each position's key and for each number of the values.
struct Coarse {
    float* key_scale;        // positions
    int32_t* key_sum;        // positions: 128 times the sum of the key's numbers
    float* value_scale;      // width
    static int64_t lanes(const HeadShape& s) { return 2 * (int64_t)whole(s.positions) + whole(s.width); }
    static Coarse at(int32_t* memory, const HeadShape& s) {
        return {(float*)memory, memory + whole(s.positions), (float*)memory + 2 * whole(s.positions)};
    }
};

static INLINE float step_of(const float* x, int count, int64_t stride) {
    float top = 0.0f;
    for (int i = 0; i < count; i++) {
        const float size = std::fabs(x[i * stride]);
        if (!(size <= top)) top = size;  // NaN stays
    }
    return top == 0.0f ? 1.0f : std::isfinite(top) ? top / 127 : NAN;
}
static INLINE int8_t in_steps(float x, float step) {
    return step == step ? (int8_t)std::nearbyint(x / step) : 0;
}

// keys, values: positions x width.
static void put_coarse(int32_t* keys, int32_t* values, const Coarse& c, const HeadShape& shape, const float* key,
                       const float* value, int count) {
    const int width = shape.width, depth = shape.depth();
    for (int t = 0; t < count; t++) {
        const float step = step_of(key + (int64_t)t * width, width, 1);
        int32_t* block = keys + (int64_t)(t / W) * depth * W + t % W;
        int32_t total = 0;
        block[(int64_t)(depth - 1) * W] = 0;
        for (int d = 0; d < width; d++) {
            const int8_t q = in_steps(key[(int64_t)t * width + d], step);
            ((int8_t*)(block + (int64_t)(d / 4) * W))[d % 4] = q;
            total += q;
        }
        c.key_scale[t] = step, c.key_sum[t] = 128 * total;
    }
    std::memset(values + (int64_t)((count - 1) / 4) * whole(width), 0, (size_t)width * 4);
    for (int d = 0; d < width; d++) {
        const float step = step_of(value + d, count, width);
        for (int t = 0; t < count; t++)
            ((int8_t*)(values + (int64_t)(t / 4) * whole(width) + d))[t % 4] =
                in_steps(value[(int64_t)t * width + d], step);
        c.value_scale[d] = step;
    }
}

template <int BLOCKS>
static INLINE void coarse_blocks(const int32_t* query, const int32_t* keys, int depth, const Coarse& c, int start,
                                 float scale, float* scores) {
    vi sums[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) sums[b] = vi{};
    for (int g = 0; g < depth; g++) {
        const vi q = broadcast(query[g]);
        for (int b = 0; b < BLOCKS; b++) sums[b] = Int8::dot(q, loadi(keys + ((int64_t)b * depth + g) * W), sums[b]);
    }
    for (int b = 0; b < BLOCKS; b++) {
        const int t = start + b * W;
        const vf exact = __builtin_convertvector(sums[b] - loadi(c.key_sum + t), vf);
        store(scores + t, exact * (load(c.key_scale + t) * broadcast(scale)));
    }
}

template <int VECTORS>
static INLINE void coarse_vectors(const int32_t* shares, const int32_t* values, int count, int stride, float* out) {
    vi sums[VECTORS];
    for (int v = 0; v < VECTORS; v++) sums[v] = vi{};
    for (int g = 0; g < count; g++) {
        const vi share = broadcast(shares[g]);
        for (int v = 0; v < VECTORS; v++)
            sums[v] = Int8::dot(share, loadi(values + (int64_t)g * stride + v * W), sums[v]);
    }
    for (int v = 0; v < VECTORS; v++) store(out + v * W, __builtin_convertvector(sums[v], vf));
}

// ``attend`` over int8 keys and values; the query has one scale, and a share of the softmax is one of 255 steps.
static void attend_coarse(const float* query, const int32_t* keys, const int32_t* values, const Coarse& c,
                          const HeadShape& shape, int count, const HeadScratch& at, float* out) {
    const int depth = shape.depth(), blocks = groups(count, W), stride = whole(shape.width);
    const float step = step_of(query, shape.width, 1);
    at.query[depth - 1] = (int32_t)0x80808080;
    for (int d = 0; d < shape.width; d++) ((uint8_t*)at.query)[d] = (uint8_t)(in_steps(query[d], step) + 128);
    int b = 0;
    for (; b + ABREAST <= blocks; b += ABREAST)
        coarse_blocks<ABREAST>(at.query, keys + (int64_t)b * depth * W, depth, c, b * W, step, at.scores);
    for (; b < blocks; b++) coarse_blocks<1>(at.query, keys + (int64_t)b * depth * W, depth, c, b * W, step, at.scores);
    soften(at.scores, count, nullptr);
    vi total{};  // of the rounded shares: they sum to one again
    const int groups_of_four = groups(count, 4);
    uint8_t* shares = (uint8_t*)at.shares;
    const vf magic = broadcast(12582912.0f);
    vi wrong{};
    for (b = 0; b < blocks; b++) {
        const vf q = multiply_add(load(at.scores + b * W), broadcast(255.0f), magic) - magic;
        const vi whole_q = __builtin_convertvector(choose(q == q, q, vf{}), vi);
        wrong |= q != q;
        total += whole_q;
#if defined(__AVX512F__)
        const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)whole_q);
        std::memcpy(shares + b * W, &bytes, W);
#else
        for (int j = 0; j < W; j++) shares[b * W + j] = (uint8_t)whole_q[j];
#endif
    }
    int steps = 0, odd = 0, v = 0;
    for (int i = 0; i < W; i++) steps += total[i], odd |= wrong[i];
    const float scale = odd ? NAN : 1.0f / (float)steps;
    for (; v + ABREAST * W <= stride; v += ABREAST * W)
        coarse_vectors<ABREAST>(at.shares, values + v, groups_of_four, stride, at.mixed + v);
    for (; v < stride; v += W) coarse_vectors<1>(at.shares, values + v, groups_of_four, stride, at.mixed + v);
    for (v = 0; v < stride; v += W)
        store(at.mixed + v, load(at.mixed + v) * (load(c.value_scale + v) * broadcast(scale)));
    std::memcpy(out, at.mixed, (size_t)shape.width * 4);
}

}  // namespace calm
