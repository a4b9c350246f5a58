// llama.cpp's perplexity of a text in windows that each begin anew with the begin token, every other token of a window scored: what
// `suanpan eval perplexity` measures. Own tokens, own arithmetic.
//
//   perplexity_llama_cpp model.gguf text.txt window windows [threads] [flash_attn 0|1] [f16|f32: K/V]
// One JSON object: {"window", "windows", "nll": [mean of a window], "perplexity", "seconds", "flash_attn"}.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "llama.h"

int main(int argc, char ** argv) {
    if (argc < 5) { std::fprintf(stderr, "see the head of this file's source\n"); return 2; }
    const int window = std::atoi(argv[3]), wanted = std::atoi(argv[4]);
    const int threads = argc > 5 ? std::atoi(argv[5]) : 2, flash = argc > 6 ? std::atoi(argv[6]) : 0;
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) { std::fprintf(stderr, "cannot load %s\n", argv[1]); return 1; }
    const llama_vocab * words = llama_model_get_vocab(model);
    const int vocab = llama_vocab_n_tokens(words);
    std::ifstream in(argv[2], std::ios::binary);
    std::string text((std::istreambuf_iterator<char>(in)), {});
    // Enough of it for the windows: no token is longer than a hundred bytes on average.
    text.resize(std::min(text.size(), (size_t) window * wanted * 100));
    std::vector<llama_token> ids(text.size() + 16);
    const int n = llama_tokenize(words, text.data(), text.size(), ids.data(), ids.size(), false, false);
    if (n < 0) { std::fprintf(stderr, "tokenize failed\n"); return 1; }
    const bool bos = llama_vocab_get_add_bos(words);
    const int own = window - bos, windows = std::min(wanted, n / own);

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = window;
    cp.n_batch = cp.n_ubatch = 512;
    cp.n_threads = cp.n_threads_batch = threads;
    cp.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    if (argc > 7 && std::string(argv[7]) == "f32") { cp.type_k = cp.type_v = GGML_TYPE_F32; }
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { std::fprintf(stderr, "cannot make a context\n"); return 1; }
    const auto start = std::chrono::steady_clock::now();
    double all = 0;
    std::printf("{\"window\": %d, \"windows\": %d, \"nll\": [", window, windows);
    for (int w = 0; w < windows; ++w) {
        std::vector<llama_token> tokens;
        if (bos) { tokens.push_back(llama_vocab_bos(words)); }
        tokens.insert(tokens.end(), ids.begin() + (size_t) w * own, ids.begin() + (size_t) (w + 1) * own);
        llama_memory_clear(llama_get_memory(ctx), true);
        double sum = 0;
        for (int first = 0; first < window; first += 512) {
            const int count = std::min(512, window - first);
            llama_batch batch = llama_batch_init(count, 0, 1);
            batch.n_tokens = count;
            for (int i = 0; i < count; ++i) {
                batch.token[i] = tokens[first + i];
                batch.pos[i] = (llama_pos) (first + i);
                batch.n_seq_id[i] = 1;
                batch.seq_id[i][0] = 0;
                batch.logits[i] = true;
            }
            if (llama_decode(ctx, batch) != 0) { std::fprintf(stderr, "decode failed\n"); return 1; }
            for (int i = 0; i < count && first + i + 1 < window; ++i) {
                const float * logits = llama_get_logits_ith(ctx, i);
                const float max = *std::max_element(logits, logits + vocab);
                double total = 0;
                for (int v = 0; v < vocab; ++v) { total += std::exp((double) logits[v] - max); }
                sum += max + std::log(total) - logits[tokens[first + i + 1]];
            }
            llama_batch_free(batch);
        }
        all += sum / (window - 1);
        std::printf("%s%.6f", w ? ", " : "", sum / (window - 1));
        std::fflush(stdout);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("], \"perplexity\": %.6f, \"seconds\": %.1f, \"flash_attn\": %d}\n", std::exp(all / windows), seconds, flash);
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
