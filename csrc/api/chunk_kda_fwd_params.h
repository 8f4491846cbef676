// Everything one forward call hands from the host to a kernel. Plain data, passed by value.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KDA_HOST_DEVICE __host__ __device__
#else
#define KDA_HOST_DEVICE
#endif

enum class Dtype : int { kFloat32, kBFloat16, kFloat16, kFloat64 };
enum class GateMode : int { kGiven, kSoftplus, kBounded };  // g as given; -exp(A_log) softplus(.); bound * sigmoid(.)
enum class BetaMode : int { kGiven, kSigmoid, kTwiceSigmoid };

// What a launch over segments of sequences does. Either they run side by side: a segment maps the state that enters it
// to the one that leaves it, affinely, S -> M S + B. `kMaps` finds M and B of every segment but the last (and runs the
// first for good, its state being known); `kReplay` runs the others from the states that the maps gave. Or, `kTurn`, a
// launch runs one segment of every sequence, and each turn other heads have two blocks.
enum class Pass : int { kWhole, kMaps, kReplay, kTurn };

// A [B, T, heads, ...] tensor whose last dimension is contiguous: where each row is.
struct Rows {
    const void* data;
    int64_t batch_bytes, token_bytes, head_bytes;
};

struct ChunkKdaFwdParams {
    // Shapes as in fla.ops.kda.chunk_kda. Rows of q, k, v and g are 16-byte aligned; what is not `Rows` is contiguous.
    Rows q;                      // [B, T, H, 128] bf16
    Rows k;                      // [B, T, H, 128] bf16
    Rows v;                      // [B, T, HV, 128] bf16
    Rows g;                      // [B, T, HV, 128] bf16 or fp32
    Rows beta;                   // [B, T, HV]
    void* o;                     // [B, T, HV, 128] bf16
    const float* initial_state;  // [N, HV, 128, 128] or null
    float* final_state;          // [N, HV, 128, 128] or null
    const void* A_log;           // [HV] or null
    const void* dt_bias;         // [HV * 128] or null
    const void* cu_seqlens;      // [N + 1] int32 or int64, or null: then N = B sequences of T tokens

    int* next_work;  // how many works blocks that stay have gone on to, or null: each takes one in so many
    int* order;      // [N], the sequences in the order in which blocks take them, or null: as they come

    int64_t num_sequences;  // N
    int64_t tokens;         // T < 2^31 (with cu_seqlens: of the one packed row)
    int num_v_heads;        // HV, a multiple of H
    int heads_a_query;      // HV / H

    float scale;
    float lower_bound;  // natural log units, used by GateMode::kBounded
    GateMode gate_mode;
    BetaMode beta_mode;
    Dtype g_dtype, beta_dtype, A_log_dtype, dt_bias_dtype;
    bool use_qk_l2norm;
    bool state_v_first;  // states are [N, HV, V, K] instead of [N, HV, K, V]
    bool cu_seqlens_is_int64;

    // Where sequences are cut, on the Hopper kernel; otherwise 1, kWhole and null.
    int segments;
    Pass pass;
    int turn;        // of kTurn, which has as many turns as segments
    int64_t paired;  // the first so many works of the launch have two blocks each, the others one
    float* maps;     // side by side: [N, segments, HV, 2, V, K]: M^T, and B^T, later the state leaving the segment
    float* carried;  // in turns: [N, HV, V, K], states between them
};

// The heads that have two blocks in one turn; all have had them once when the turns are over.
KDA_HOST_DEVICE inline int paired_a_turn(const ChunkKdaFwdParams& params) {
    return int((uint32_t(params.num_sequences * params.num_v_heads) + params.segments - 1) / params.segments);
}

// How many works a launch has: both maps of the inner segments, the leaving state alone of the first.
KDA_HOST_DEVICE inline int64_t works_of_pass(const ChunkKdaFwdParams& params) {
    const int64_t heads = params.num_sequences * params.num_v_heads;
    switch (params.pass) {
        case Pass::kWhole:
        case Pass::kTurn: return heads;
        case Pass::kMaps: return heads * (2 * params.segments - 3);
        default: return heads * (params.segments - 1);
    }
}

// How many blocks they have; where some have two, blocks come in pairs.
KDA_HOST_DEVICE inline int64_t blocks_of_pass(const ChunkKdaFwdParams& params) {
    const int64_t blocks = works_of_pass(params) + params.paired;
    return params.paired > 0 ? (blocks + 1) / 2 * 2 : blocks;
}

// Whether a launch goes on from states that one before it of the same call leaves; and whether one goes on from its.
KDA_HOST_DEVICE inline bool goes_on(const ChunkKdaFwdParams& params) {
    return params.pass == Pass::kReplay || (params.pass == Pass::kTurn && params.turn > 0);
}
KDA_HOST_DEVICE inline bool is_gone_on_from(const ChunkKdaFwdParams& params) {
    return params.pass == Pass::kMaps || (params.pass == Pass::kTurn && params.turn + 1 < params.segments);
}
