// Confidences after a layer, and the words that rows say.
#pragma once
#include "layers.h"
#include "words.h"

namespace calm {

struct Look {  // what a measure sees of the vocabulary
    Best best;
    Spread spread;
    int words;
};

static float inner_product(const float* a, const float* b, int count) {
    vf total{};
    int k = 0;
    for (; k + W <= count; k += W) total = multiply_add(load(a + k), load(b + k), total);
    float rest = sum(total);
    for (; k < count; k++) rest += a[k] * b[k];
    return rest;
}

static float clamped(float x) { return x < 0.0f ? 0.0f : x > 1.0f ? 1.0f : x; }

static float cosine(const float* a, const float* b, int count) {
    const float norm = std::sqrt(inner_product(a, a, count)) * std::sqrt(inner_product(b, b, count));
    return clamped(inner_product(a, b, count) / (norm > 1e-8f || norm != norm ? norm : 1e-8f));
}

static bool reads_words(int64_t measure) { return measure >= 0 && measure != STATE && measure != CLASSIFIER; }

// Logits of these slots' hidden over all words; row i at s.logits + i * vocabulary.
static void all_words(const Model& m, Scratch& s, const int32_t* slots, int count) {
    Scratch::need(s.logits, (size_t)count * m.vocabulary + W);
    s.x.shape(m.kind, count, m.d_model);
    for (int i = 0; i < count; i++) put_normed(m, s, i, m.hidden + (int64_t)slots[i] * m.d_model);
    product(s.x, m.head, s.logits.data(), m.vocabulary);
}

// Logits of one row over its candidates.
static void candidate_words(const Model& m, Scratch& s, int slot, float* logits) {
    float* normed = Scratch::need(s.normed, m.d_model);
    normalise(m.hidden + (int64_t)slot * m.d_model, m.d_model, m.eps, normed);
    const int32_t* ids = m.candidates + (int64_t)slot * m.head_k;
    for (int j = 0; j < m.head_k; j++) {
        if (m.words_fp32) {
            logits[j] = inner_product(m.words_fp32 + (int64_t)ids[j] * m.d_model, normed, m.d_model);
            continue;
        }
        const bf16* word = m.words + (int64_t)ids[j] * m.d_model;
        vf total{};
        int k = 0;
        for (; k + W <= m.d_model; k += W) {
            float wide[W];
            for (int i = 0; i < W; i++) wide[i] = of_bf16(word[k + i]);
            total = multiply_add(load(wide), load(normed + k), total);
        }
        float rest = sum(total);
        for (; k < m.d_model; k++) rest += of_bf16(word[k]) * normed[k];
        logits[j] = rest;
    }
}

static bool has_candidates(const Model& m, int slot) {
    return m.head_kind == CANDIDATES && m.candidates[(int64_t)slot * m.head_k] != NOTHING;
}

static Look look_at(const float* logits, int words, bool spread) {
    Look look{best_of(logits, words), {}, words};
    if (spread) look.spread = spread_of(logits, words, look.best.first);
    return look;
}

static float confidence_of(const Model& m, int slot, int64_t measure, const Look& look) {
    const float top = std::exp(look.best.first - look.spread.log_total);
    switch (measure) {
        case SOFTMAX: return clamped(top - std::exp(look.best.second - look.spread.log_total));
        case MAX_PROB: return clamped(top);
        case ENTROPY: return clamped(1.0f - (look.spread.log_total - look.spread.mean) / std::log((float)look.words));
        default: return std::fmin((float)m.run[slot] / (float)m.run_lengths[slot], 1.0f);  // agreement
    }
}

struct Checker {
    std::vector<int32_t> asked, narrow;
    std::vector<float> confidence;  // by place in the wave
    std::vector<std::pair<float, int32_t>> heap;
};

static void look(const Model& m, int slot, int place, const float* logits, int words, const int32_t* ids, Checker& c) {
    const int64_t measure = m.measures[slot];
    const Look seen = look_at(logits, words, measure != AGREEMENT);
    if (measure == AGREEMENT) {
        const int word = seen.best.word < 0 ? NOTHING : ids ? ids[seen.best.word] : seen.best.word;
        m.run[slot] = m.run[slot] > 0 && m.argmax[slot] == word ? m.run[slot] + 1 : 1;
        m.argmax[slot] = word;
    }
    c.confidence[place] = confidence_of(m, slot, measure, seen);
}

// Confidences of the rows that may leave after this layer; NaN for those that nobody asks.
static void ask(const Model& m, Scratch& s, Checker& c, const Wave& w) {
    c.confidence.assign(w.active_count, NAN);
    c.asked.clear(), c.narrow.clear();
    std::vector<int32_t>& places = c.narrow;  // of the rows in ``asked``
    for (int i = 0; i < w.active_count; i++) {
        const int slot = w.active[i];
        const int64_t measure = m.measures[slot];
        if (measure < 0 || (w.holds && m.crossed[slot])) continue;
        const float* hidden = m.hidden + (int64_t)slot * m.d_model;
        if (measure == STATE) {
            if (w.layer > 1) c.confidence[i] = cosine(hidden, m.previous + (int64_t)slot * m.d_model, m.d_model);
        } else if (measure == CLASSIFIER) {
            const float x = inner_product(m.classifier, hidden, m.d_model) + m.classifier_bias;
            c.confidence[i] = 1.0f / (1.0f + std::exp(-x));
        } else if (has_candidates(m, slot)) {
            float* logits = Scratch::need(s.logits, m.head_k + W);
            candidate_words(m, s, slot, logits);
            look(m, slot, i, logits, m.head_k, m.candidates + (int64_t)slot * m.head_k, c);
        } else {
            c.asked.push_back(slot), places.push_back(i);
        }
    }
    if (c.asked.empty()) return;
    all_words(m, s, c.asked.data(), (int)c.asked.size());
    for (size_t j = 0; j < c.asked.size(); j++) {
        const float* logits = s.logits.data() + (int64_t)j * m.vocabulary;
        look(m, c.asked[j], places[j], logits, m.vocabulary, nullptr, c);
        if (m.head_kind == CANDIDATES)
            largest_k(logits, m.vocabulary, m.head_k, m.candidates + (int64_t)c.asked[j] * m.head_k, c.heap);
    }
}

// Greedy words of these rows. ``emission``: where each speaks.
static void say(const Model& m, Scratch& s, Checker& c, const int32_t* slots, const int32_t* emission, int count,
                int32_t* words) {
    c.asked.clear(), c.narrow.clear();
    for (int i = 0; i < count; i++) {
        const int slot = slots[i];
        const bool early = m.crossed[slot] && emission[i] < m.layers && reads_words(m.measures[slot]) &&
                           m.depths[(int64_t)slot * m.positions + m.step[slot]] == 0;
        if (early && has_candidates(m, slot)) {
            float* logits = Scratch::need(s.logits, m.head_k + W);
            candidate_words(m, s, slot, logits);
            const Best best = best_of(logits, m.head_k);
            words[i] = best.word < 0 ? NOTHING : m.candidates[(int64_t)slot * m.head_k + best.word];
        } else {
            c.asked.push_back(slot), c.narrow.push_back(i);
        }
    }
    if (c.asked.empty()) return;
    all_words(m, s, c.asked.data(), (int)c.asked.size());
    for (size_t j = 0; j < c.asked.size(); j++)
        words[c.narrow[j]] = best_of(s.logits.data() + (int64_t)j * m.vocabulary, m.vocabulary).word;
}

}  // namespace calm
