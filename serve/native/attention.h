// Attention of one query over the keys and values of one head, laid out so that neither needs a transposition.
//
// Keys come in blocks of 16 positions: a block holds, for each lane of d_kv, that lane of all 16 positions side by
// side, so that 16 scores are one running sum. Values come in groups of as many positions as a lane holds: a group
// holds, for each number of d_kv, that number of its positions.
#pragma once
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
    for (int d = 0; d < shape.width; d++)
        ((typename T::Number*)(block + (int64_t)(d / T::PER) * W))[d % T::PER] = T::round(key[d]);
}

template <class T>
static void put_value(int32_t* values, const HeadShape& shape, int position, const float* value) {
    int32_t* group = values + (int64_t)(position / T::PER) * whole(shape.width);
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
    vf tops = broadcast(-INFINITY);
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (b = 0; b < blocks; b++) {
        vf s = load(at.scores + b * W);
        if (bias) s += load(bias + b * W);
        s = choose(lane + broadcast(b * W) < broadcast(count), s, broadcast(-INFINITY));
        store(at.scores + b * W, s);
        tops = larger(s, tops);
    }
    const vf top = broadcast(largest(tops));
    vf total{};
    for (b = 0; b < blocks; b++) {
        vf e = exponential(load(at.scores + b * W) - top);
        store(at.scores + b * W, e);
        total += e;
    }
    const float scale = 1.0f / sum(total);
    put_lanes<T>(at.shares, at.scores, count);
    const int shares = groups(count, T::PER);
    int v = 0;
    for (; v + ABREAST <= stride / W; v += ABREAST)
        mix_vectors<T, ABREAST>(at.shares, values + v * W, shares, stride, scale, at.mixed + v * W);
    for (; v < stride / W; v++) mix_vectors<T, 1>(at.shares, values + v * W, shares, stride, scale, at.mixed + v * W);
    std::memcpy(out, at.mixed, (size_t)shape.width * 4);
}

}  // namespace calm
