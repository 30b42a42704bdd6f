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

// ``state`` or ``classifier``; NaN where there is none.
static float confidence_of_state(const Model& m, int slot, int64_t measure, int layer) {
    const float* hidden = m.hidden + (int64_t)slot * m.d_model;
    if (measure == CLASSIFIER)
        return 1.0f / (1.0f + std::exp(-inner_product(m.classifier, hidden, m.d_model) - m.classifier_bias));
    return layer > 1 ? cosine(hidden, m.previous + (int64_t)slot * m.d_model, m.d_model) : NAN;
}

static bool reads_words(int64_t measure) { return measure >= 0 && measure != STATE && measure != CLASSIFIER; }

// Logits of these slots' hidden over all words; row i at s.logits + i * vocabulary.
static void all_words(const Model& m, Scratch& s, const int32_t* slots, int count) {
    Scratch::need(s.logits, (size_t)count * m.vocabulary + W);
    s.x.shape(m.head_numbers, count, m.d_model);
    for (int i = 0; i < count; i++) put_normed(m, s, i, m.hidden + (int64_t)slots[i] * m.d_model);
    product(s.x, m.head, s.logits.data(), m.vocabulary);
}

// Logits of a few words for one row: each is one sum in the order of a product, so it has the bits of ``all_words``
// where that has the same kind of numbers.
template <class T>
static void words_of(const Model& m, const int32_t* x, int depth, const int32_t* ids, int count, float* logits) {
    for (int start = 0; start < count; start += W) {
        const int here = count - start < W ? count - start : W;
        const int32_t* rows[W];
        for (int j = 0; j < W; j++) rows[j] = m.words + (int64_t)ids[start + (j < here ? j : 0)] * depth;
        typename T::Sum total{};
        for (int k = 0; k < depth; k++) {
            vi word;
            for (int j = 0; j < W; j++) word[j] = rows[j][k];
            total = T::dot(broadcast(x[k]), word, total);
        }
        for (int j = 0; j < here; j++) logits[start + j] = total[j];
    }
}
static void few_words(const Model& m, Scratch& s, int slot, const int32_t* ids, int count, float* logits) {
    float* normed = Scratch::need(s.normed, m.d_model);
    normalise(m.hidden + (int64_t)slot * m.d_model, m.d_model, m.eps, normed);
    s.few.shape(m.word_numbers, 1, m.d_model);
    s.few.put(0, normed);
    m.word_numbers == FP32 ? words_of<Fp32>(m, s.few.row(0), s.few.depth, ids, count, logits)
                           : words_of<Bf16>(m, s.few.row(0), s.few.depth, ids, count, logits);
}

// Logits of one row over its candidates.
static void candidate_words(const Model& m, Scratch& s, int slot, float* logits) {
    few_words(m, s, slot, m.candidates + (int64_t)slot * m.head_k, m.head_k, logits);
}

// What the screen knows of a row: the norms of its normalised state and of what int8 misses of it.
struct Doubt {
    float norm, lost;
};

// Int8 logits of these slots over all words, and each row's doubt unless that is null.
static void screen_words(const Model& m, Scratch& s, const int32_t* slots, int count, std::vector<Doubt>* doubts) {
    Scratch::need(s.logits, (size_t)count * m.vocabulary + W);
    s.x.shape(INT8, count, m.d_model);
    if (doubts) doubts->resize(count);
    for (int i = 0; i < count; i++) {
        float* normed = Scratch::need(s.normed, m.d_model);
        normalise(m.hidden + (int64_t)slots[i] * m.d_model, m.d_model, m.eps, normed);
        if (m.head_numbers == BF16)  // the doubt is about what the full head multiplies
            for (int k = 0; k < m.d_model; k++) normed[k] = of_bf16(to_bf16(normed[k]));
        s.x.put(i, normed);
        if (!doubts) continue;
        const uint8_t* q = (const uint8_t*)s.x.row(i);
        double norm = 0, lost = 0;
        for (int k = 0; k < m.d_model; k++) {
            const float x = s.normed[k], gap = x - s.x.scale[i] * (float)((int)q[k] - 128);
            norm += (double)x * x, lost += (double)gap * gap;
        }
        (*doubts)[i] = {(float)std::sqrt(norm) * 1.001f, (float)std::sqrt(lost) * 1.001f};
    }
    product(s.x, m.screen, s.logits.data(), m.vocabulary);
}

static bool has_candidates(const Model& m, int slot) {
    return m.head_kind == CANDIDATES && m.candidates[(int64_t)slot * m.head_k] != NOTHING;
}

static Look look_at(const float* logits, int words, bool spread, bool mean) {
    Look look{best_of(logits, words), {}, words};
    if (spread) look.spread = spread_of(logits, words, look.best.first, mean);
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

// ``asked``: slots of the rows that look at the vocabulary; ``places``: of these rows in the wave.
struct Checker {
    std::vector<int32_t> asked, places, ids;
    std::vector<float> exact;
    std::vector<Doubt> doubts;
    std::vector<float> confidence;  // by place in the wave
    std::vector<std::pair<float, int32_t>> heap;
};

static void look(const Model& m, int slot, int place, int layer, const float* logits, int words, const int32_t* ids,
                 Checker& c) {
    const int64_t measure = m.measures[slot];
    const Look seen = look_at(logits, words, measure != AGREEMENT, measure == ENTROPY);
    if (m.head_kind == FULL_HEAD) m.seen[slot] = seen.best.word, m.seen_after[slot] = layer;
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
    c.asked.clear(), c.places.clear();
    for (int i = 0; i < w.active_count; i++) {
        const int slot = w.active[i];
        const int64_t measure = m.measures[slot];
        if (measure < 0 || (w.holds && m.crossed[slot])) continue;
        if (!reads_words(measure)) {
            c.confidence[i] = confidence_of_state(m, slot, measure, w.layer);
        } else if (has_candidates(m, slot)) {
            float* logits = Scratch::need(s.logits, m.head_k + W);
            candidate_words(m, s, slot, logits);
            look(m, slot, i, w.layer, logits, m.head_k, m.candidates + (int64_t)slot * m.head_k, c);
        } else {
            c.asked.push_back(slot), c.places.push_back(i);
        }
    }
    if (c.asked.empty()) return;
    const int count = (int)c.asked.size();
    if (m.head_kind == SCREENED)
        screen_words(m, s, c.asked.data(), count, nullptr);
    else
        all_words(m, s, c.asked.data(), count);
    for (int j = 0; j < count; j++) {
        float* logits = s.logits.data() + (int64_t)j * m.vocabulary;
        if (m.head_kind == SCREENED) {  // the best of them exactly, the others' int8
            c.ids.resize(m.head_k), c.exact.resize(m.head_k);
            largest_k(logits, m.vocabulary, m.head_k, c.ids.data(), c.heap);
            few_words(m, s, c.asked[j], c.ids.data(), m.head_k, c.exact.data());
            for (int i = 0; i < m.head_k; i++) logits[c.ids[i]] = c.exact[i];
        }
        look(m, c.asked[j], c.places[j], w.layer, logits, m.vocabulary, nullptr, c);
        if (m.head_kind == CANDIDATES)
            largest_k(logits, m.vocabulary, m.head_k, m.candidates + (int64_t)c.asked[j] * m.head_k, c.heap);
    }
}

// Words of the rows in ``c.asked`` by the screen, at ``words[places[j]]``; those that it cannot tell stay in
// ``c.asked``. The words that could win are those of the highest bounds, and a word's logit has the full head's bits: so
// what is told is the full head's argmax.
static void say_screened(const Model& m, Scratch& s, Checker& c, std::vector<int32_t>& places, int32_t* words) {
    const int count = (int)c.asked.size(), k = m.head_k < m.vocabulary ? m.head_k : m.vocabulary - 1;
    screen_words(m, s, c.asked.data(), count, &c.doubts);
    c.ids.resize(k + 1), c.exact.resize(k + 1);
    int open = 0;
    for (int j = 0; j < count; j++) {
        float* bounds = s.logits.data() + (int64_t)j * m.vocabulary;
        const vf norm = broadcast(c.doubts[j].norm), lost = broadcast(c.doubts[j].lost);
        const float *first = m.doubt, *second = m.doubt + m.vocabulary;
        int w = 0;
        for (; w + W <= m.vocabulary; w += W)
            store(bounds + w,
                  multiply_add(norm, load(first + w), multiply_add(lost, load(second + w), load(bounds + w))));
        for (; w < m.vocabulary; w++) bounds[w] += c.doubts[j].norm * first[w] + c.doubts[j].lost * second[w];
        int best = NOTHING;
        bool sure = s.x.scale[j] == s.x.scale[j];
        if (sure) {
            for (w = 0; w + W <= m.vocabulary; w += W) {  // a word that is no number may be any
                const vf b = load(bounds + w);
                store(bounds + w, choose(b == b, b, broadcast(INFINITY)));
            }
            for (; w < m.vocabulary; w++) bounds[w] = bounds[w] == bounds[w] ? bounds[w] : INFINITY;
            largest_k(bounds, m.vocabulary, k + 1, c.ids.data(), c.heap);
            few_words(m, s, c.asked[j], c.ids.data(), k, c.exact.data());
            float top = -INFINITY;
            bool numbers = true;
            for (int i = 0; i < k; i++) {
                numbers &= c.exact[i] == c.exact[i];
                if (c.exact[i] > top || (c.exact[i] == top && c.ids[i] < best)) top = c.exact[i], best = c.ids[i];
            }
            sure = numbers && bounds[c.ids[k]] < top && std::isfinite(top);
        }
        if (sure)
            words[places[j]] = best;
        else
            c.asked[open] = c.asked[j], places[open] = places[j], open++;
    }
    c.asked.resize(open), places.resize(open);
}

// The full head's words of the rows in ``c.asked``, at ``words[c.places[j]]``.
static void say_asked(const Model& m, Scratch& s, Checker& c, int32_t* words, int32_t* fallbacks) {
    if (m.head_kind == SCREENED && !c.asked.empty()) {
        say_screened(m, s, c, c.places, words);
        *fallbacks += (int32_t)c.asked.size();
    }
    if (c.asked.empty()) return;
    all_words(m, s, c.asked.data(), (int)c.asked.size());
    for (size_t j = 0; j < c.asked.size(); j++)
        words[c.places[j]] = best_of(s.logits.data() + (int64_t)j * m.vocabulary, m.vocabulary).word;
}

// Greedy words of these rows. ``emission``: where each speaks; ``fallbacks`` counts rows that the screen left open.
static void say(const Model& m, Scratch& s, Checker& c, const int32_t* slots, const int32_t* emission, int count,
                int32_t* words, int32_t* fallbacks) {
    c.asked.clear(), c.places.clear();
    for (int i = 0; i < count; i++) {
        const int slot = slots[i];
        if (m.seen_after[slot] == emission[i]) {  // the full head has looked at this very state
            words[i] = m.seen[slot];
            continue;
        }
        const bool early = m.crossed[slot] && emission[i] < m.layers && reads_words(m.measures[slot]) &&
                           m.depths[(int64_t)slot * m.positions + m.step[slot]] == 0;
        if (early && has_candidates(m, slot)) {
            float* logits = Scratch::need(s.logits, m.head_k + W);
            candidate_words(m, s, slot, logits);
            const Best best = best_of(logits, m.head_k);
            words[i] = best.word < 0 ? NOTHING : m.candidates[(int64_t)slot * m.head_k + best.word];
        } else {
            c.asked.push_back(slot), c.places.push_back(i);
        }
    }
    say_asked(m, s, c, words, fallbacks);
}

}  // namespace calm
