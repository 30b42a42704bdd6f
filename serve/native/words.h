// What a check and an emission read off a row of logits.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "vector.h"

namespace calm {

constexpr int NOTHING = -1;

struct Best {
    int word;            // NOTHING where the largest logit is NaN or infinite
    float first, second;
};

// The two largest logits and where the first is; of equal ones the smallest id.
static Best best_of(const float* logits, int count) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vf first = broadcast(-INFINITY), second = first, wrong{};
    vi where = lane;
    int k = 0;
    for (; k + W <= count; k += W) {
        const vf x = load(logits + k);
        wrong += x * broadcast(0.0f);  // NaN where one is not finite: looked at below
        const vi better = x > first;
        second = larger(choose(better, first, x), second);
        first = choose(better, x, first);
        where = choose(better, lane + broadcast(k), where);
    }
    float f[W], s[W];
    int32_t w[W];
    store(f, first), store(s, second);
    std::memcpy(w, &where, 64);
    Best best{w[0], f[0], s[0]};
    auto see = [&best](float x, int word) {
        if (x > best.first || (x == best.first && word < best.word)) {
            best.second = best.first, best.first = x, best.word = word;
        } else if (x > best.second) {
            best.second = x;
        }
    };
    for (int i = 1; i < W; i++) {
        see(f[i], w[i]);
        if (s[i] > best.second) best.second = s[i];
    }
    for (; k < count; k++) see(logits[k], k);
    bool nan = false;
    for (k = count - count % W; k < count; k++) nan |= logits[k] != logits[k];
    if (sum(wrong) != 0.0f)
        for (int i = 0; i < count; i++) nan |= logits[i] != logits[i];
    if (nan || !std::isfinite(best.first)) best.word = NOTHING, best.first = nan ? NAN : best.first;
    return best;
}

struct Spread {
    float log_total;  // log sum exp
    float mean;       // of the logits under the softmax
};

// ``top``: the largest of the logits; ``mean``: whether that is wanted too.
static Spread spread_of(const float* logits, int count, float top, bool mean) {
    vf total{}, weighed{};
    const vf shift = broadcast(top);
    int k = 0;
    float rest = 0.0f, rest_weighed = 0.0f;
    for (; k + W <= count; k += W) {
        const vf x = load(logits + k) - shift, e = exponential(x);
        total += e;
        if (mean) weighed += choose(e > vf{}, e * x, vf{});
    }
    if (k < count) {
        float tail[W];
        for (int i = 0; i < W; i++) tail[i] = k + i < count ? logits[k + i] - top : -INFINITY;
        const vf x = load(tail), e = exponential(x);
        rest = sum(e), rest_weighed = sum(choose(e > vf{}, e * x, vf{}));
    }
    const float all = sum(total) + rest;
    return {top + std::log(all), top + (sum(weighed) + rest_weighed) / all};
}

// Ids of the ``k`` largest logits, the largest first; of equal ones the smaller id first.
static void largest_k(const float* logits, int count, int k, int32_t* ids, std::vector<std::pair<float, int32_t>>& heap) {
    heap.clear();
    // the smallest kept is on top; of equal logits the larger id counts as smaller
    auto before = [](const std::pair<float, int32_t>& a, const std::pair<float, int32_t>& b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    float least = -INFINITY;
    auto see = [&](float x, int32_t id) {
        if ((int)heap.size() < k) {
            heap.emplace_back(x, id);
            std::push_heap(heap.begin(), heap.end(), before);
        } else if (x > heap.front().first) {
            std::pop_heap(heap.begin(), heap.end(), before);
            heap.back() = {x, id};
            std::push_heap(heap.begin(), heap.end(), before);
        }
        if ((int)heap.size() == k) least = heap.front().first;
    };
    int i = 0;
    for (; i < k && i < count; i++) see(logits[i], i);
    for (; i + W <= count; i += W) {
        const vi above = load(logits + i) > broadcast(least);
#if defined(__AVX512F__)
        uint32_t mask = _mm512_test_epi32_mask((__m512i)above, (__m512i)above);
#else
        uint32_t mask = 0;
        for (int j = 0; j < W; j++) mask |= (uint32_t)(above[j] & 1) << j;
#endif
        for (; mask; mask &= mask - 1) {
            const int j = __builtin_ctz(mask);
            see(logits[i + j], i + j);
        }
    }
    for (; i < count; i++) see(logits[i], i);
    std::sort_heap(heap.begin(), heap.end(), before);
    for (int j = 0; j < (int)heap.size(); j++) ids[j] = heap[j].second;
}

}  // namespace calm
