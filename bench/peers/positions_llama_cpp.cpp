// llama.cpp's tokens of a text, and its best log-probabilities at chosen positions of a token list. One JSON object, or one id, a line.
//
//   positions_llama_cpp model.gguf tokenize text.txt              ids of the file's text, begin token included, control tokens not meant
//   positions_llama_cpp model.gguf top ids.txt n1,n2,... [threads] [batch] [f16|f32: K/V]     for each n: the 20 best after the first n ids
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "llama.h"

static int tokenize(llama_model * model, const char * path) {
    std::ifstream in(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    const llama_vocab * vocab = llama_model_get_vocab(model);
    std::vector<llama_token> ids(text.size() + 16);
    const auto start = std::chrono::steady_clock::now();
    const int n = llama_tokenize(vocab, text.data(), text.size(), ids.data(), ids.size(), true, false);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (n < 0) { std::fprintf(stderr, "tokenize failed\n"); return 1; }
    std::fprintf(stderr, "%d tokens of %zu bytes in %.3f s\n", n, text.size(), seconds);
    for (int i = 0; i < n; ++i) { std::printf("%d\n", ids[i]); }
    return 0;
}

static void print_top(int n, const float * logits, int vocab) {
    std::vector<int> order(vocab);
    for (int i = 0; i < vocab; ++i) { order[i] = i; }
    std::partial_sort(order.begin(), order.begin() + 20, order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
    double sum = 0;
    for (int i = 0; i < vocab; ++i) { sum += std::exp((double) logits[i] - logits[order[0]]); }
    const double all = logits[order[0]] + std::log(sum);
    std::printf("{\"tokens\": %d, \"ids\": [", n);
    for (int i = 0; i < 20; ++i) { std::printf("%s%d", i ? ", " : "", order[i]); }
    std::printf("], \"logprobs\": [");
    for (int i = 0; i < 20; ++i) { std::printf("%s%.6f", i ? ", " : "", logits[order[i]] - all); }
    std::printf("]}\n");
}

int main(int argc, char ** argv) {
    if (argc < 4) { std::fprintf(stderr, "see the head of this file's source\n"); return 2; }
    llama_backend_init();
    llama_model_params mp = llama_model_default_params();
    const bool top = !std::strcmp(argv[2], "top");
    mp.vocab_only = !top;
    llama_model * model = llama_model_load_from_file(argv[1], mp);
    if (!model) { std::fprintf(stderr, "cannot load %s\n", argv[1]); return 1; }
    if (!top) { return tokenize(model, argv[3]); }

    std::vector<llama_token> ids;
    std::ifstream in(argv[3]);
    for (int id; in >> id;) { ids.push_back(id); }
    std::set<int> wanted;
    for (char * at = std::strtok(argv[4], ","); at; at = std::strtok(nullptr, ",")) { wanted.insert(std::atoi(at)); }
    const int threads = argc > 5 ? std::atoi(argv[5]) : 2, batch_size = argc > 6 ? std::atoi(argv[6]) : 512;
    ids.resize(std::min<size_t>(ids.size(), *wanted.rbegin()));

    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = ids.size() + 1;
    cp.n_batch = cp.n_ubatch = batch_size;
    cp.n_threads = cp.n_threads_batch = threads;
    if (argc > 7 && !std::strcmp(argv[7], "f32")) { cp.type_k = cp.type_v = GGML_TYPE_F32; }
    llama_context * ctx = llama_init_from_model(model, cp);
    if (!ctx) { std::fprintf(stderr, "cannot make a context\n"); return 1; }
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto start = std::chrono::steady_clock::now();
    for (size_t first = 0; first < ids.size(); first += batch_size) {
        const int n = (int) std::min<size_t>(batch_size, ids.size() - first);
        llama_batch batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        for (int i = 0; i < n; ++i) {
            batch.token[i] = ids[first + i];
            batch.pos[i] = (llama_pos) (first + i);
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i] = wanted.count((int) (first + i + 1)) > 0;
        }
        if (llama_decode(ctx, batch) != 0) { std::fprintf(stderr, "decode failed\n"); return 1; }
        for (int i = 0; i < n; ++i) {
            if (batch.logits[i]) { print_top((int) (first + i + 1), llama_get_logits_ith(ctx, i), vocab); }
        }
        llama_batch_free(batch);
    }
    std::fprintf(stderr, "%.2f s\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    llama_free(ctx);
    llama_model_free(model);
    return 0;
}
