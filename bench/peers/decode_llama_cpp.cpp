// Prefill and decode speed of llama.cpp at a depth, apart: the cache of a prefill is saved, so that decoding can be timed again without it.
//
//   decode_llama_cpp model.gguf prefill depth state.bin [threads] [flash_attn 0|1]          reads `depth` tokens in batches of 512
//   decode_llama_cpp model.gguf decode  depth state.bin [threads] [flash_attn 0|1] [tokens] [runs]
// One JSON object: {"phase", "depth", "threads", "flash_attn", "tok_per_s": [one a run]}.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "llama.h"

static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Any ids do: the arithmetic is the same. Control tokens stand first in vocabularies and are left out.
static llama_token token(int i, int vocab) { return 1000 + (int) ((long long) i * 7919 % (vocab - 2000)); }

static int run(llama_context * ctx, int first, int n, int vocab) {
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        batch.token[i] = token(first + i, vocab);
        batch.pos[i] = (llama_pos) (first + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = i == n - 1;
    }
    const int bad = llama_decode(ctx, batch);
    llama_batch_free(batch);
    return bad;
}

int main(int argc, char ** argv) {
    if (argc < 5) { std::fprintf(stderr, "see the head of this file's source\n"); return 2; }
    const bool prefill = !std::strcmp(argv[2], "prefill");
    const int depth = std::atoi(argv[3]);
    const int threads = argc > 5 ? std::atoi(argv[5]) : 2, flash = argc > 6 ? std::atoi(argv[6]) : 1;
    const int tokens = argc > 7 ? std::atoi(argv[7]) : 32, runs = argc > 8 ? std::atoi(argv[8]) : 3;
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) { std::fprintf(stderr, "cannot load %s\n", argv[1]); return 1; }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = depth + tokens * runs + 16;
    cp.n_batch = cp.n_ubatch = 512;
    cp.n_threads = cp.n_threads_batch = threads;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { std::fprintf(stderr, "cannot make a context\n"); return 1; }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::vector<double> rates;
    if (prefill) {
        if (run(ctx, 0, 1, vocab)) { return 1; }
        llama_memory_clear(llama_get_memory(ctx), true);
        const double start = now();
        for (int first = 0; first < depth; first += 512) {
            if (run(ctx, first, std::min(512, depth - first), vocab)) { std::fprintf(stderr, "decode failed\n"); return 1; }
        }
        rates.push_back(depth / (now() - start));
        if (!llama_state_save_file(ctx, argv[4], nullptr, 0)) { std::fprintf(stderr, "cannot save %s\n", argv[4]); return 1; }
    } else {
        size_t count = 0;
        if (!llama_state_load_file(ctx, argv[4], nullptr, 0, &count)) { std::fprintf(stderr, "cannot load %s\n", argv[4]); return 1; }
        int at = depth;
        for (int r = 0; r < runs; ++r) {
            const double start = now();
            for (int i = 0; i < tokens; ++i, ++at) {
                if (run(ctx, at, 1, vocab)) { std::fprintf(stderr, "decode failed\n"); return 1; }
            }
            rates.push_back(tokens / (now() - start));
        }
    }
    std::printf("{\"phase\": \"%s\", \"depth\": %d, \"threads\": %d, \"flash_attn\": %d, \"tok_per_s\": [", argv[2], depth, threads, flash);
    for (size_t i = 0; i < rates.size(); ++i) { std::printf("%s%.2f", i ? ", " : "", rates[i]); }
    std::printf("]}\n");
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
