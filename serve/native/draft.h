// Rounds of rows that draft: the first layers speak for the next positions, the others read all positions in one pass.
// A row's numbers do not depend on how many rows a product has, so what is said has the bits of full depth.
#pragma once
#include "checks.h"
#include "timer.h"

namespace calm {

static INLINE int lane_of(const Model& m, int slot, int place) { return m.slots + slot * PLACES + place; }

// Up through a layer; ``keeps``: what was before it is wanted too.
static void raise_lanes(const Model& m, Scratch& s, Draft& d, int layer, const std::vector<int32_t>& lanes,
                        bool keeps) {
    run_layer(m, s, layer, lanes.data(), (int)lanes.size());
    const size_t bytes = (size_t)m.d_model * 4;
    for (size_t i = 0; i < lanes.size(); i++) {
        float* hidden = m.hidden + (int64_t)lanes[i] * m.d_model;
        if (keeps) std::memcpy(m.previous + (int64_t)lanes[i] * m.d_model, hidden, bytes);
        std::memcpy(hidden, s.residual.data() + (int64_t)i * m.d_model, bytes);
    }
    d.batch[d.ran++] = (int32_t)lanes.size();
}

struct Drafter {
    std::vector<int32_t> lanes, rows;
};

// Words of these lanes by the layers below: a screened head speaks by its screen, since a draft may be wrong.
static void guess(const Model& m, Scratch& s, Drafter& at, Draft& d, int place) {
    const int count = (int)at.lanes.size();
    if (m.head_kind == SCREENED)
        screen_words(m, s, at.lanes.data(), count, nullptr);
    else
        all_words(m, s, at.lanes.data(), count);
    const bool asks = d.measure >= 0, reads = asks && reads_words(d.measure);
    int kept = 0;
    for (int i = 0; i < count; i++) {
        const int row = at.rows[i];
        const Look seen = look_at(s.logits.data() + (int64_t)i * m.vocabulary, m.vocabulary, reads, d.measure == ENTROPY);
        if (seen.best.word < 0) continue;  // no number: the whole stack will say so
        if (asks) {
            const float confidence = reads ? confidence_of(m, at.lanes[i], d.measure, seen)
                                           : confidence_of_state(m, at.lanes[i], d.measure, d.layer);
            if (!(confidence >= d.threshold)) continue;
        }
        d.drafted[row * PLACES + place] = seen.best.word;
        d.guesses[row]++;
        if (seen.best.word != d.eos) at.rows[kept++] = row;  // nobody stands behind an end
    }
    at.rows.resize(kept);
}

// Fills ``drafted``, ``guesses`` and ``positions``, and leaves each position's hidden after ``layer`` in its lane.
static void draft(const Model& m, Scratch& s, Drafter& at, Draft& d, Timer& timer) {
    at.rows.resize(d.count);
    for (int i = 0; i < d.count; i++) at.rows[i] = i, d.guesses[i] = 0;
    for (int place = 0; !at.rows.empty(); place++) {
        at.lanes.clear();
        for (const int row : at.rows) {
            const int slot = d.slots[row], lane = lane_of(m, slot, place);
            at.lanes.push_back(lane);
            d.positions[row] = place + 1;
            m.step[lane] = m.step[slot] + place;
            put_embedding(m, place ? d.drafted[row * PLACES + place - 1] : m.token[slot],
                          m.hidden + (int64_t)lane * m.d_model);
        }
        for (int layer = 1; layer <= d.layer; layer++)
            raise_lanes(m, s, d, layer, at.lanes, d.measure == STATE && layer == d.layer);
        timer(DRAFT_LAYERS);
        if (place == d.length) break;
        int going = 0;
        for (size_t i = 0; i < at.rows.size(); i++) {
            if (d.room[at.rows[i]] <= place + 1) continue;
            at.rows[going] = at.rows[i], at.lanes[going++] = at.lanes[i];
        }
        at.rows.resize(going), at.lanes.resize(going);
        if (going) guess(m, s, at, d, place);
        timer(DRAFT_HEAD);
    }
}

// The layers above over all positions at once, and what the whole stack says at each.
static void verify(const Model& m, Scratch& s, Checker& c, Drafter& at, Draft& d, Timer& timer) {
    at.lanes.clear(), c.asked.clear(), c.places.clear();
    for (int row = 0; row < d.count; row++) {
        for (int place = 0; place < d.positions[row]; place++) {
            at.lanes.push_back(lane_of(m, d.slots[row], place));
            c.places.push_back(row * PLACES + place);
        }
    }
    for (int layer = d.layer + 1; layer <= m.layers; layer++) raise_lanes(m, s, d, layer, at.lanes, false);
    timer(VERIFY);
    c.asked = at.lanes;
    say_asked(m, s, c, d.words, &d.fallbacks);
    timer(WORDS);
}

}  // namespace calm
