// Writes llama.cpp's logits of every position for given token ids: raw little-endian f32 [tokens, vocab] to a file.
// It tokenises nothing: ids come from a text file, so that every engine is fed the same numbers.
//
//   logits_llama_cpp model.gguf ids.txt out.f32 [threads] [flash_attn 0|1] [batch]
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc < 4) {
        std::fprintf(stderr, "usage: %s model.gguf ids.txt out.f32 [threads] [flash_attn 0|1] [batch]\n", argv[0]);
        return 2;
    }
    const int threads = argc > 4 ? std::atoi(argv[4]) : 2;
    const int flash   = argc > 5 ? std::atoi(argv[5]) : 0;

    std::vector<llama_token> ids;
    std::FILE * in = std::fopen(argv[2], "r");
    if (!in) { std::perror(argv[2]); return 1; }
    for (int id; std::fscanf(in, "%d", &id) == 1;) { ids.push_back(id); }
    std::fclose(in);
    const int batch_size = argc > 6 ? std::atoi(argv[6]) : (int) ids.size();

    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) { std::fprintf(stderr, "cannot load %s\n", argv[1]); return 1; }
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx           = ids.size() + 1;
    cp.n_batch         = batch_size;
    cp.n_ubatch        = batch_size;
    cp.n_threads       = threads;
    cp.n_threads_batch = threads;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { std::fprintf(stderr, "cannot make a context\n"); return 1; }

    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    std::FILE * out = std::fopen(argv[3], "wb");
    if (!out) { std::perror(argv[3]); return 1; }
    for (size_t first = 0; first < ids.size(); first += batch_size) {
        const int n = (int) std::min<size_t>(batch_size, ids.size() - first);
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i]     = ids[first + i];
            batch.pos[i]       = (llama_pos) (first + i);
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = true;
        }
        if (llama_decode(ctx, batch) != 0) { std::fprintf(stderr, "decode failed\n"); return 1; }
        for (int i = 0; i < n; ++i) {
            if (std::fwrite(llama_get_logits_ith(ctx, i), sizeof(float), vocab, out) != (size_t) vocab) { std::perror(argv[3]); return 1; }
        }
        llama_batch_free(batch);
    }
    std::fclose(out);
    std::printf("{\"tokens\": %zu, \"vocab\": %d, \"threads\": %d, \"flash_attn\": %d}\n", ids.size(), vocab, threads, flash);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
