// One decode step of a wave on a CPU: calm.rules.climb, told in one call so that nobody waits for an interpreter
// between two layers. The functions at the end are what serve/native calls.
#include <new>

#include "draft.h"
#include "encoder.h"

namespace calm {

struct Engine {
    Model m;
    Scratch scratch;
    Checker checker;
    Drafter drafter;
};

static void start(Engine& e, const Wave& w) {
    const Model& m = e.m;
    for (int i = 0; i < w.active_count; i++) {
        const int slot = w.active[i];
        put_embedding(m, m.token[slot], m.hidden + (int64_t)slot * m.d_model);
        m.crossed[slot] = m.run[slot] = m.seen_after[slot] = 0;
        m.crossing[slot] = m.layers;
        if (m.candidates) m.candidates[(int64_t)slot * m.head_k] = NOTHING;
        if (m.record)
            for (int k = 0; k < m.layers; k++) m.confidences[(int64_t)slot * m.layers + k] = NAN;
    }
}

static void run(Engine& e, Wave& w) {
    const Model& m = e.m;
    const size_t bytes = (size_t)m.d_model * 4;
    run_layer(m, e.scratch, w.layer, w.active, w.active_count);
    for (int i = 0; i < w.active_count; i++) {
        const int64_t slot = w.active[i];
        if (w.holds && m.crossed[slot]) continue;  // its K/V are written; its output is dropped
        std::memcpy(m.previous + slot * m.d_model, m.hidden + slot * m.d_model, bytes);
        std::memcpy(m.hidden + slot * m.d_model, e.scratch.residual.data() + (int64_t)i * m.d_model, bytes);
    }
    w.batch[w.layer - 1] = w.active_count;
}

// Whether the wave ends after this layer.
static bool check(Engine& e, Wave& w) {
    const Model& m = e.m;
    const bool asks = m.checked[w.layer];
    if (asks) ask(m, e.scratch, e.checker, w);
    int crossed = 0, out_now = 0;
    for (int i = 0; i < w.active_count; i++) {
        const int slot = w.active[i];
        const int64_t place = (int64_t)slot * m.positions + m.step[slot];
        bool out = m.depths[place] > 0 && m.depths[place] <= w.layer;
        if (asks) {
            const float confidence = e.checker.confidence[i];
            out |= confidence >= m.thresholds[place * m.layers + w.layer - 1];
            if (m.record) m.confidences[(int64_t)slot * m.layers + w.layer - 1] = confidence;
        }
        if (out && !m.crossed[slot]) m.crossed[slot] = 1, m.crossing[slot] = w.layer;
        crossed += m.crossed[slot], out_now += out;
    }
    if (w.stop == LOCKSTEP) return out_now == w.active_count;
    if (w.stop == QUANTILE) return (float)crossed >= w.share * (float)w.active_count;
    return crossed == w.active_count;
}

static void leave(const Model& m, Wave& w) {
    int kept = 0;
    for (int i = 0; i < w.active_count; i++) {
        const int slot = w.active[i];
        (m.crossed[slot] ? w.done[w.done_count++] : w.active[kept++]) = slot;
    }
    w.active_count = kept;
}

static Status climb(Engine& e, Wave& w) {
    Timer timer(w.seconds, w.cpu_time);
    while (w.layer < e.m.layers) {
        w.layer++;
        run(e, w);
        timer(LAYERS);
        const bool stops = check(e, w);
        timer(CHECKS);
        if (stops) break;
        if (w.leaves && w.layer < e.m.layers) {
            leave(e.m, w);
            if (w.pause_at >> w.layer & 1) return PAUSED;
            if (w.active_count < w.company) return PARKED;
        }
    }
    return ENDED;
}

// These layers of all rows and no others, and their words; nothing is filled in.
static void follow(Engine& e, Wave& w, const int32_t* layers, int count) {
    const Model& m = e.m;
    Timer timer(w.seconds, w.cpu_time);
    for (int i = 0; i < count; i++) {
        w.layer = layers[i];
        run(e, w);
    }
    timer(LAYERS);
    Checker& c = e.checker;
    c.asked.assign(w.active, w.active + w.active_count), c.places.resize(w.active_count);
    for (int i = 0; i < w.active_count; i++) {
        w.done[i] = w.active[i], c.places[i] = i;
        w.crossing[i] = w.emission[i] = w.layer, w.executed[i] = count, w.involuntary[i] = 0;
    }
    say_asked(m, e.scratch, c, w.tokens, &w.fallbacks);
    timer(HEAD);
}

// Words of the done and the active rows, in this order, and the K/V above their exits.
static void speak(Engine& e, Wave& w) {
    const Model& m = e.m;
    Timer timer(w.seconds, w.cpu_time);
    const int count = w.done_count + w.active_count;
    std::memcpy(w.done + w.done_count, w.active, (size_t)w.active_count * 4);
    for (int i = 0; i < count; i++) {
        const int slot = w.done[i], crossing = m.crossing[slot];
        w.crossing[i] = crossing;
        w.emission[i] = w.holds && crossing < w.layer ? crossing : w.layer;
        w.executed[i] = w.leaves ? w.emission[i] : w.layer;
        w.involuntary[i] = !m.crossed[slot] && w.emission[i] < m.layers;
    }
    say(m, e.scratch, e.checker, w.done, w.emission, count, w.tokens, &w.fallbacks);
    timer(HEAD);
    std::vector<int32_t>& written = e.scratch.written;
    written.assign(w.executed, w.executed + count);
    const bool row_exact = w.holds && w.stop == ALL_CROSSED;
    for (int i = 0; row_exact && i < count; i++)
        if (!m.fills[w.done[i]]) written[i] = m.layers;
    backfill(m, e.scratch, w.done, written.data(), count);
    timer(BACKFILL);
}

// Keys and values of a source (layers x heads x length x d_kv), head by head.
template <class T>
static void put_head(const Model& m, const HeadShape& shape, int64_t at, const float* keys, const float* values,
                     int length) {
    int32_t *k = m.cross_keys + at * shape.key_lanes(), *v = m.cross_values + at * shape.value_lanes();
    if constexpr (T::PER == 4) {
        put_coarse(k, v, Coarse::at(m.coarse + at * Coarse::lanes(shape), shape), shape, keys, values, length);
    } else {
        for (int t = 0; t < length; t++) {
            put_key<T>(k, shape, t, keys + (int64_t)t * m.d_kv);
            put_value<T>(v, shape, t, values + (int64_t)t * m.d_kv);
        }
    }
}
template <class T>
static void put_source(const Model& m, int slot, const float* keys, const float* values, int length) {
    const HeadShape shape = cross_shape(m);
    for (int layer = 1; layer <= m.layers; layer++)
        for (int h = 0; h < m.heads; h++) {
            const int64_t from = ((int64_t)(layer - 1) * m.heads + h) * length * m.d_kv;
            put_head<T>(m, shape, head_at(m, layer, slot, h), keys + from, values + from, length);
        }
    m.source_length[slot] = length;
}

// Every number of a slot's K/V becomes ``lane``.
static void fill(const Model& m, int slot, int32_t lane) {
    const HeadShape own = own_shape(m), cross = cross_shape(m);
    for (int layer = 1; layer <= m.layers; layer++) {
        const int64_t at = head_at(m, layer, slot, 0);
        std::fill_n(m.keys + at * own.key_lanes(), m.heads * own.key_lanes(), lane);
        std::fill_n(m.values + at * own.value_lanes(), m.heads * own.value_lanes(), lane);
        std::fill_n(m.cross_keys + at * cross.key_lanes(), m.heads * cross.key_lanes(), lane);
        std::fill_n(m.cross_values + at * cross.value_lanes(), m.heads * cross.value_lanes(), lane);
        if (m.coarse) std::fill_n(m.coarse + at * Coarse::lanes(cross), m.heads * Coarse::lanes(cross), lane);
    }
}

}  // namespace calm

using namespace calm;

extern "C" {

// What the products are made of: where it differs, so may the last bits.
const char* calm_instructions() {
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
    return "avx512-bf16-vnni";
#elif defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__FMA__)
    return "fma";
#else
    return "plain";
#endif
}

int64_t calm_packed_lanes(int32_t outputs, int32_t inputs, int32_t kind) { return packed_lanes(outputs, inputs, kind); }

void calm_pack(const float* weights, int32_t outputs, int32_t inputs, int32_t kind, void* packed, float* scale,
               int32_t* correction) {
    pack(weights, outputs, inputs, kind, packed, scale, correction);
}

// out[i][n] = x[i] . weights[n], by weights that were packed
void calm_product(const float* x, int32_t rows, const void* packed, const float* scale, const int32_t* correction,
                  int32_t outputs, int32_t inputs, int32_t kind, float* out) {
    Rows left;
    left.shape(kind, rows, inputs);
    for (int i = 0; i < rows; i++) left.put(i, x + (int64_t)i * inputs);
    product(left, {packed, scale, correction, outputs, inputs}, out, outputs);
}

// Lanes of one head's keys and values of so many positions.
int64_t calm_key_lanes(int32_t positions, int32_t width, int32_t kind) {
    return HeadShape{positions, width, per_lane(kind)}.key_lanes();
}
int64_t calm_value_lanes(int32_t positions, int32_t width, int32_t kind) {
    return HeadShape{positions, width, per_lane(kind)}.value_lanes();
}

int64_t calm_coarse_lanes(int32_t positions, int32_t width) {
    return Coarse::lanes(HeadShape{positions, width, 4});
}

int32_t calm_model_bytes() { return sizeof(Model); }
int32_t calm_wave_bytes() { return sizeof(Wave); }
int32_t calm_draft_bytes() { return sizeof(Draft); }
int32_t calm_draft_places() { return PLACES; }
int32_t calm_encoder_bytes() { return sizeof(Encoder); }

Engine* calm_engine_new(const Model* model) { return new Engine{*model, {}, {}, {}}; }
void calm_engine_free(Engine* engine) { delete engine; }

void calm_put_source(Engine* e, int32_t slot, const float* keys, const float* values, int32_t length) {
    const int32_t kind = e->m.cross_kind;
    (kind == FP32 ? put_source<Fp32> : kind == BF16 ? put_source<Bf16> : put_source<Int8>)(e->m, slot, keys, values,
                                                                                            length);
}
void calm_fill(Engine* e, int32_t slot, int32_t lane) { fill(e->m, slot, lane); }

void calm_start(Engine* e, Wave* w) { start(*e, *w); }
// A Status, or NO_MEMORY.
int32_t calm_climb(Engine* e, Wave* w) {
    try {
        return climb(*e, *w);
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}
int32_t calm_follow(Engine* e, Wave* w, const int32_t* layers, int32_t count) {
    try {
        follow(*e, *w, layers, count);
        return ENDED;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}
int32_t calm_speak(Engine* e, Wave* w) {
    try {
        speak(*e, *w);
        return ENDED;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// One round of these rows: draft, then verify. ENDED or NO_MEMORY.
int32_t calm_speculate(Engine* e, Draft* d) {
    try {
        Timer timer(d->seconds, d->cpu_time);
        draft(e->m, e->scratch, e->drafter, *d, timer);
        verify(e->m, e->scratch, e->checker, e->drafter, *d, timer);
        return ENDED;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

EncoderEngine* calm_encoder_new(const Encoder* encoder) { return new EncoderEngine{*encoder, {}, {}}; }
void calm_encoder_free(EncoderEngine* engine) { delete engine; }
// ENDED or NO_MEMORY; see encode.
int32_t calm_encode(EncoderEngine* e, const int32_t* tokens, const int32_t* lengths, int32_t count,
                    float* const* keys, float* const* values) {
    try {
        encode(*e, tokens, lengths, count, keys, values);
        return ENDED;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    }
}

// out: count x vocabulary
void calm_logits(Engine* e, const int32_t* slots, int32_t count, float* out) {
    all_words(e->m, e->scratch, slots, count);
    std::memcpy(out, e->scratch.logits.data(), (size_t)count * e->m.vocabulary * 4);
}
}
