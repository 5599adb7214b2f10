// FlashMLA's dense and sparse decodes behind C functions, so that its sources compile without torch and ahead of the
// run. One key head; pages of 64 rows; all tensors contiguous. The caller gives the scratch. Sparse decodes read rows of
// 656 bytes, those of DeepSeek V3.2, and have 64 or 128 heads.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <cuda_runtime_api.h>
#include <cutlass/bfloat16.h>

#include "params.h"
#include "sm90/decode/dense/splitkv_mla.h"
#include "sm90/decode/sparse_fp8/splitkv_mla.h"
#include "smxx/decode/combine/combine.h"
#include "smxx/decode/get_decoding_sched_meta/get_decoding_sched_meta.h"

namespace {
constexpr int kPage = 64, kBlockM = 64, kOverheadBlocks = 5, kRowBytes = 656;
}

extern "C" {

struct FlashMlaCall {
    void *q, *cache, *out;          // [batch, q_len, heads, width], [pages, 64, width], [batch, q_len, heads, latent]
    int32_t *tables, *lens;         // [batch, columns], [batch]; sparse: lists [batch, q_len, columns], null
    int32_t *metadata, *splits;     // [parts, 8], [batch + 1]
    float *lse;                     // [batch, q_len * heads]
    float *lse_parts, *out_parts;   // [batch + parts, q_len * heads], [batch + parts, q_len * heads, latent]
    cudaStream_t stream;
    int32_t batch, q_len, heads, width, latent, pages, columns, parts, causal;
    float scale;
};

static int plan(const FlashMlaCall *c, int topk, int extra_topk) {
    GetDecodeSchedMetaParams params = {c->batch,  c->q_len, kPage,
                                       kOverheadBlocks, topk, extra_topk,
                                       nullptr,   nullptr,  c->lens,
                                       reinterpret_cast<DecodingSchedMeta *>(c->metadata), c->splits, c->parts,
                                       c->stream};
    smxx::decode::run_get_decoding_sched_meta_kernel(params);
    return cudaGetLastError();
}

static int combine(const FlashMlaCall *c) {
    const int rows = c->q_len * c->heads;
    CombineParams params = {c->batch, c->q_len, c->heads, c->latent,
                            c->lse, c->out, rows, c->heads, rows * c->latent, c->heads * c->latent, c->latent,
                            c->lse_parts, c->out_parts, rows, c->heads, rows * c->latent, c->heads * c->latent, c->latent,
                            reinterpret_cast<DecodingSchedMeta *>(c->metadata), c->splits, c->parts, nullptr, c->stream};
    smxx::decode::run_flash_mla_combine_kernel<cutlass::bfloat16_t>(params);
    return cudaGetLastError();
}

const char *flash_mla_commit() { return FLASH_MLA_COMMIT; }

int flash_mla_parts(int multiprocessors, int q_len, int heads) {
    return std::max(multiprocessors / ((q_len * heads + kBlockM - 1) / kBlockM), 1);
}

int flash_mla_sparse_parts(int multiprocessors, int q_len, int heads) {
    return std::max(multiprocessors / q_len / (heads / kBlockM), 1);
}

int flash_mla_plan(const FlashMlaCall *c) { return plan(c, -1, -1); }

int flash_mla_sparse_plan(const FlashMlaCall *c) { return plan(c, c->columns, 0); }

int flash_mla_run(const FlashMlaCall *c) {
    const int rows = c->q_len * c->heads;
    auto *metadata = reinterpret_cast<DecodingSchedMeta *>(c->metadata);
    DenseAttnDecodeParams p = {};
    p.b = c->batch, p.s_q = c->q_len, p.q_seq_per_hk = rows, p.d = c->width, p.d_v = c->latent;
    p.h_q = c->heads, p.h_k = 1, p.num_blocks = c->pages, p.q_head_per_hk = c->heads;
    p.is_causal = c->causal && c->q_len > 1;
    p.scale_softmax = c->scale, p.scale_softmax_log2 = float(c->scale * M_LOG2E);
    p.q_ptr = c->q, p.k_ptr = c->cache, p.o_ptr = c->out, p.softmax_lse_ptr = c->lse;
    p.q_batch_stride = int64_t(rows) * c->width, p.q_row_stride = c->width, p.q_head_stride = c->width;
    p.k_batch_stride = int64_t(kPage) * c->width, p.k_row_stride = c->width, p.k_head_stride = c->width;
    p.o_batch_stride = p.o_head_stride = int64_t(rows) * c->latent, p.o_row_stride = c->latent;
    p.block_table = c->tables, p.block_table_batch_stride = c->columns, p.page_block_size = kPage;
    p.seqlens_k_ptr = c->lens, p.tile_scheduler_metadata_ptr = metadata;
    p.num_sm_parts = c->parts, p.num_splits_ptr = c->splits, p.total_num_splits = c->batch + c->parts;
    p.softmax_lseaccum_ptr = c->lse_parts, p.oaccum_ptr = c->out_parts, p.stream = c->stream;
    sm90::run_flash_splitkv_mla_kernel<cutlass::bfloat16_t>(p);
    return combine(c);
}

int flash_mla_sparse_run(const FlashMlaCall *c) {
    const int rows = c->q_len * c->heads;
    SparseAttnDecodeParams p = {};
    p.b = c->batch, p.s_q = c->q_len, p.h_q = c->heads, p.h_kv = 1, p.d_qk = c->width, p.d_v = c->latent;
    p.sm_scale = c->scale, p.sm_scale_div_log2 = float(c->scale * M_LOG2E);
    p.num_blocks = c->pages, p.page_block_size = kPage, p.topk = c->columns, p.model_type = ModelType::V32;
    p.q = static_cast<cutlass::bfloat16_t *>(c->q), p.kv = static_cast<cutlass::bfloat16_t *>(c->cache);
    p.indices = c->tables, p.lse = c->lse, p.out = static_cast<cutlass::bfloat16_t *>(c->out);
    p.stride_q_b = rows * c->width, p.stride_q_s_q = c->heads * c->width, p.stride_q_h_q = c->width;
    p.stride_kv_block = kPage * kRowBytes, p.stride_kv_row = kRowBytes;
    p.stride_indices_b = c->q_len * c->columns, p.stride_indices_s_q = c->columns;
    p.stride_lse_b = p.stride_lse_accum_split = rows, p.stride_lse_s_q = p.stride_lse_accum_s_q = c->heads;
    p.stride_o_b = p.stride_o_accum_split = rows * c->latent;
    p.stride_o_s_q = p.stride_o_accum_s_q = c->heads * c->latent;
    p.stride_o_h_q = p.stride_o_accum_h_q = c->latent;
    p.lse_accum = c->lse_parts, p.o_accum = c->out_parts, p.stream = c->stream;
    p.tile_scheduler_metadata_ptr = reinterpret_cast<DecodingSchedMeta *>(c->metadata);
    p.num_splits_ptr = c->splits, p.num_sm_parts = c->parts;
    if (c->heads == 64)
        sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::V32, 64>(p);
    else if (c->heads == 128)
        sm90::decode::sparse_fp8::run_flash_splitkv_mla_fp8_sparse_kernel<ModelType::V32, 128>(p);
    else
        return cudaErrorInvalidValue;
    return combine(c);
}
}
