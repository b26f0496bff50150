// The C interface of the verification attention kernel. See verify_attention.cuh for what it computes.
#pragma once
#include <stdint.h>

// How a launch runs; none changes what is computed.
enum SparseSpecVerifyFlags {
  SPARSESPEC_DEPENDENT_MERGE = 1,  // the merge kernel is launched as a programmatic dependent of the first
  SPARSESPEC_DEPENDENT_VERIFY = 2, // the first kernel as one of whatever precedes it in the stream
  SPARSESPEC_EQUAL_RANGES = 4,     // CTAs never get whole units (see schedule.cuh): for comparisons
};

// Plain data: the Python side fills the same struct through ctypes, so the order and the types are the interface.
struct SparseSpecVerifyArgs {
  const void* q;             // bf16 [rows * padded_queries, q_heads, head_dim], 16-byte aligned, token stride q_stride
  const void* k_cache;       // bf16 [slots, kv_heads, head_dim]
  const void* v_cache;       // bf16, as k_cache
  const int32_t* page_table; // [rows, width], row stride page_stride: KV slot of each logical position
  const int32_t* first;      // [rows] committed length: query t stands at position first + t
  const int32_t* queries;    // [rows] real queries, 0 .. padded_queries; 0 = empty row slot
  void* out;                 // bf16 [rows * padded_queries, q_heads, head_dim]; zero for padding queries
  float* lse;                // [q_heads, rows * padded_queries] natural log; -inf for padding queries
  const float* ref_lse;      // [rows, padded_queries, q_heads] natural log, -inf or NaN = no estimate; null: no scores
  const int64_t* offset;     // [rows] where the row's keys stand in a score line; negative: the row gets no scores
  const int32_t* prefix;     // [rows] keys 0 .. prefix - 1 get a score
  int32_t* score;            // [capacity] or [kv_heads, capacity] fixed point, added to; null: no scores
  void* workspace;           // sparsespec_verify_workspace() bytes, 16-byte aligned, contents do not matter
  int64_t workspace_bytes;
  int64_t q_stride;          // elements between two tokens of q, a multiple of 8; 0 = q_heads * head_dim
  int64_t page_stride;       // elements
  int64_t capacity;          // elements of one score line
  int64_t score_stride;      // elements between the score lines of two KV heads; 0 = all heads add to one line
  int32_t rows, padded_queries, q_heads, kv_heads, head_dim, width;
  float scale;               // of q.k before the softmax
  int32_t shift;             // a probability of 1 adds 2^shift to a score
  int32_t device;            // CUDA device index
  int32_t flags;             // of SparseSpecVerifyFlags
  void* stream;              // cudaStream_t
};

#ifdef __cplusplus
extern "C" {
#endif
// Returns 0, or non-zero with a text in sparsespec_verify_error().
int sparsespec_verify_attention(const struct SparseSpecVerifyArgs* args);
// Bytes of workspace for a shape on a device, whatever the number of rows and their lengths; negative: unsupported.
int64_t sparsespec_verify_workspace(int32_t head_dim, int32_t group, int32_t padded_queries, int32_t device);
// Text of this thread's last failure.
const char* sparsespec_verify_error(void);
#ifdef __cplusplus
}
#endif
