// What the step is given: a decoder's weights, the slots of its rows, and where each row stands. All memory is the
// caller's; these are views of it. Layers count from 1 in numbers and from 0 in arrays.
#pragma once
#include "matrix.h"

namespace calm {

enum Activation : int32_t { RELU = 0, GELU_NEW = 1, SILU = 2, GELU = 3 };
enum Measure : int32_t { SOFTMAX = 0, STATE = 1, CLASSIFIER = 2, MAX_PROB = 3, ENTROPY = 4, AGREEMENT = 5 };
enum Head : int32_t { FULL_HEAD = 0, CANDIDATES = 1, SCREENED = 2 };

struct Layer {
    Matrix q, kv, o, cross_q, cross_o, up, down;  // norms are folded into what they precede; up: gate, then up
};

struct Model {
    int32_t layers, heads, d_model, d_kv, d_ff, vocabulary, kind, cache_kind, cross_kind, activation, gated;
    float eps, classifier_bias;
    const Layer* layer;
    Matrix head;
    const void* embed;  // vocabulary x d_model, fp32 or bf16
    int32_t embed_kind;
    int32_t head_kind, head_k;  // Head
    int32_t head_numbers;       // Kind of ``head``
    int32_t word_numbers;       // Kind of ``words``
    const int32_t* words;       // vocabulary x lanes: the head's rows as they lie, for looks at a few of them
    Matrix screen;              // int8 head
    const float* doubt;         // 2 x vocabulary: how far a word's int8 logit can be off, see serve.screen
    const float* bias;         // heads x (positions + 16), by distance, the largest first
    const float* classifier;   // d_model
    const uint8_t* checked;    // layers + 1: whether a row may leave after a layer

    // slots: of rows, one after another
    int32_t slots, positions, sources, record;
    int32_t *keys, *values, *cross_keys, *cross_values;  // layers x slots x heads x lanes of a head
    int32_t* coarse;                                     // the same, of int8 cross K/V: see Coarse
    int32_t* source_length;
    const float* thresholds;     // slots x positions x layers
    const int64_t* depths;       // slots x positions; 0: confidences decide
    const int64_t* measures;     // slots; -1: none
    const int64_t* run_lengths;  // slots; k of ``agreement``
    const uint8_t* fills;        // slots; 0: nobody reads K/V above the row's depth, which is fixed

    // where a row stands in its step; after the slots come the lanes: positions of a row that drafts, PLACES a slot
    float *hidden, *previous;  // (slots + lanes) x d_model
    int32_t *step, *home;      // slots + lanes; home: the slot whose K/V it reads and writes, a slot's own number
    int32_t *token, *crossing, *crossed, *argmax, *run;
    int32_t *seen, *seen_after;  // best word of the full head's last look, and the layer it looked after; 0: none yet
    int32_t* candidates;       // slots x head_k; the first is NOTHING before the first check
    float* confidences;        // slots x layers
};

// A wave: rows that climb together, by slot. ``active`` rows climb, ``done`` rows have left and wait to speak.
struct Wave {
    int32_t active_count, done_count, layer;
    int32_t holds, leaves, stop;  // stop: Stop
    float share;
    int32_t company;   // fewer active rows than this are parked
    uint64_t pause_at;  // bit l: come back after layer l, where others wait
    int32_t *active, *done;
    // what it said, done rows first
    int32_t *tokens, *crossing, *emission, *executed, *involuntary;
    int32_t* batch;   // rows that layer l ran on
    double* seconds;  // by Phase
    int32_t fallbacks;
    int32_t cpu_time;  // seconds are those that this thread was running
};

constexpr int PLACES = 16;  // positions that a row may stand at in one round

// A round of rows that draft: the first layers say what the next words may be, the others read all of them at once.
struct Draft {
    int32_t count, layer, length;   // rows; layers that draft; words drafted at most
    int32_t measure;                // drafting stops where this confidence is below ``threshold``; -1: none
    float threshold;
    int32_t eos;                    // after which nobody drafts; -1: any word may follow
    const int32_t *slots, *room;    // rows; words that each may still say, 1 at least
    int32_t *positions, *guesses;   // of each row in this round: where it stood, and how many words it drafted
    int32_t* drafted;               // count x PLACES
    int32_t* words;                 // count x PLACES: what the whole stack says at each position
    int32_t* batch;                 // rows of each layer that ran, in order
    int32_t ran;
    int32_t fallbacks, cpu_time;
    double* seconds;                // by Stage
};

enum Stage : int32_t { DRAFT_LAYERS = 0, DRAFT_HEAD = 1, VERIFY = 2, WORDS = 3 };
enum Stop : int32_t { ALL_CROSSED = 0, QUANTILE = 1, LOCKSTEP = 2 };
enum Status : int32_t { ENDED = 0, PAUSED = 1, PARKED = 2, NO_MEMORY = 3 };
enum Phase : int32_t { LAYERS = 0, CHECKS = 1, HEAD = 2, BACKFILL = 3, PHASES = 4 };

}  // namespace calm
