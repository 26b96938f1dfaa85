// What tests/chain/kernels/cpu/test_processors.py runs for one instruction set, on a processor or an
// emulator of one: products, passes and a draft of random models, and noise, printed number by
// number.
//
// Each line is a name and its numbers, in nine digits, which tell all bits of a float32.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "passes/passes.h"

using namespace polybasic;

extern "C" {
void polybasic_use_openmp(void* parallel, void* thread_number, void* num_threads);
void* polybasic_new_workspace(const Model* model, int max_context);
void polybasic_delete_workspace(void* space);
void polybasic_pass(const Model* model, const Pass* pass, void* space, int num_threads);
void polybasic_drafts(const Model* model, const DraftShape* shapes, int num, void* space,
                      int num_threads);
void polybasic_product(const Matrix* matrix, int element, const void* rows, void* out, int num_rows,
                       float* memory, const uint8_t* const* lists, int num_threads);
void polybasic_noise(const int64_t* key, const int64_t* positions, int num_positions, int num_tokens,
                     float* out, int num_threads);
}

namespace {

constexpr int kVocabulary = 100, kHidden = 256, kInner = 512, kHeads = 4, kKeyHeads = 2, kHead = 64;
constexpr int kNumLayers = 2, kCapacity = 96, kInt4Group = 128;
constexpr int kPrompt = 37;

// In place of an OpenMP runtime.
thread_local int current_thread = 0;
int num_running = 1;
int thread_number() { return current_thread; }
int num_threads() { return num_running; }
void parallel(void (*function)(void*), void* data, unsigned num, unsigned) {
    num_running = int(num);
    std::vector<std::thread> others;
    for (unsigned i = 1; i < num; ++i)
        others.emplace_back([=] {
            current_thread = int(i);
            function(data);
        });
    function(data);
    for (std::thread& one : others) one.join();
}

// The same numbers with every compiler and processor, between -1 and 1.
struct Random {
    uint32_t state;
    uint32_t bits() { return (state = state * 1664525u + 1013904223u) >> 8; }
    float number() { return float(int32_t(bits()) - (1 << 23)) / float(1 << 23); }
};

// Memory that a model keeps, as aligned as torch's.
template <class T>
T* allocate(size_t size) {
    void* memory = std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64);
    std::memset(memory, 0, (size * sizeof(T) + 63) / 64 * 64);
    return static_cast<T*>(memory);
}

void* elements(int element, const std::vector<float>& values) {
    if (element == kBfloat16) {
        Bfloat16* to = allocate<Bfloat16>(values.size());
        for (size_t i = 0; i < values.size(); ++i) round_to(to + i, values[i]);
        return to;
    }
    float* to = allocate<float>(values.size());
    std::memcpy(to, values.data(), values.size() * sizeof(float));
    return to;
}

float element_at(int element, const void* from, size_t i) {
    return element == kBfloat16 ? widen(static_cast<const Bfloat16*>(from)[i])
                                : static_cast<const float*>(from)[i];
}

size_t bytes_of(int element) { return element == kBfloat16 ? 2 : 4; }

std::vector<float> numbers(Random& random, size_t size, float scale) {
    std::vector<float> values(size);
    for (float& value : values) value = random.number() * scale;
    return values;
}

struct Case {
    const char* name;
    int element, format;
    bool is_nested = false;
};

// Any bytes are codes in the layout that kernels read.
Matrix matrix_of(Random& random, const Case& one, int num_outputs, int num_inputs) {
    const int format = one.format;
    const bool is_nested = one.is_nested;
    Matrix matrix{};
    matrix.format = format;
    matrix.num_outputs = num_outputs;
    matrix.num_inputs = num_inputs;
    const size_t blocks = matrix.num_blocks();
    const size_t size = blocks * kLanes * num_inputs;
    if (format == kInt4) {
        matrix.group_size = kInt4Group;
        uint8_t* codes = allocate<uint8_t>(size / 2);
        for (size_t i = 0; i < size / 2; ++i) codes[i] = uint8_t(random.bits());
        const size_t groups = blocks * kLanes * matrix.num_groups();
        uint16_t* scales = allocate<uint16_t>(groups);
        uint8_t* zeros = allocate<uint8_t>(groups);
        for (size_t i = 0; i < groups; ++i) {
            scales[i] = uint16_t((9 << 10) + (random.bits() & 0x3ff));  // float16, about 0.02
            zeros[i] = uint8_t(5 + random.bits() % 6);
        }
        matrix.weights = codes;
        matrix.scales = scales;
        matrix.offsets = zeros;
    } else if (matrix.has_codes()) {
        constexpr int kZeros[] = {8, 16, 32, 0};
        matrix.group_size = kGroup;
        matrix.zero = kZeros[format - kBlocks4];
        uint8_t* codes = allocate<uint8_t>(matrix.weight_bytes());
        for (size_t i = 0; i < matrix.weight_bytes(); ++i) codes[i] = uint8_t(random.bits());
        const size_t groups = blocks * kLanes * matrix.num_groups();
        if (is_nested) {
            int8_t* factors = allocate<int8_t>(2 * groups);
            for (size_t i = 0; i < 2 * groups; ++i)
                factors[i] = int8_t(format == kBlocks6 ? random.bits() : random.bits() % 64);
            matrix.factors = factors;
        }
        uint16_t* halves = allocate<uint16_t>(2 * groups);
        // scales about 0.02, those of more bits or with factors less, and offsets of such ones
        const int exponent = (format == kBlocks8 ? 6 : format == kBlocks6 ? 8 : 9) - (is_nested ? 5 : 0);
        for (size_t i = 0; i < 2 * groups; ++i)
            halves[i] = uint16_t((exponent << 10) + 0x100 + (random.bits() & 0xff));
        for (size_t i = groups; i < 2 * groups; ++i) halves[i] |= (random.bits() & 1) << 15;
        matrix.weights = codes;
        matrix.scales = halves;
        // every second matrix has offsets
        const bool may_have_offsets = format == kBlocks4 || format == kBlocks5;
        if (may_have_offsets && (is_nested || num_outputs % 32 == 0)) matrix.offsets = halves + groups;
    } else {
        matrix.weights = elements(format, numbers(random, size, 3.0f / std::sqrt(num_inputs)));
    }
    float* bias = allocate<float>(blocks * kLanes);
    for (int i = 0; i < num_outputs; ++i) bias[i] = random.number();
    matrix.bias = bias;
    return matrix;
}

float* ones(int size) {
    float* values = allocate<float>(size);
    for (int i = 0; i < size; ++i) values[i] = 1.0f;
    return values;
}

Model model_of(const Case& one) {
    Random random{7};
    Model model{};
    model.element = one.element;
    model.num_layers = kNumLayers;
    model.hidden_size = kHidden;
    model.intermediate_size = kInner;
    model.num_heads = kHeads;
    model.num_kv_heads = kKeyHeads;
    model.head_dim = kHead;
    model.activation = kSilu;
    model.head_kind = kNoHead;
    model.norm_eps = 1e-5f;
    model.attention_scale = 1.0f / std::sqrt(float(kHead));
    model.embedding_scale = 1.0f;
    std::vector<float> cosines(kCapacity * kHead), sines(kCapacity * kHead);
    for (int position = 0; position < kCapacity; ++position)
        for (int i = 0; i < kHead; ++i) {
            const double angle = position * std::pow(10000.0, -2.0 * (i % (kHead / 2)) / kHead);
            cosines[position * kHead + i] = float(std::cos(angle));
            sines[position * kHead + i] = float(i < kHead / 2 ? -std::sin(angle) : std::sin(angle));
        }
    Layer* layers = new Layer[kNumLayers]();
    for (int i = 0; i < kNumLayers; ++i) {
        Layer& layer = layers[i];
        layer.qkv = matrix_of(random, one, (kHeads + 2 * kKeyHeads) * kHead, kHidden);
        layer.out = matrix_of(random, one, kHidden, kHeads * kHead);
        layer.gate_up = matrix_of(random, one, 2 * kInner, kHidden);
        layer.down = matrix_of(random, one, kHidden, kInner);
        layer.input_norm = ones(kHidden);
        layer.mlp_norm = ones(kHidden);
        layer.cosines = elements(one.element, cosines);
        layer.sines = elements(one.element, sines);
    }
    model.layers = layers;
    model.embedding = elements(one.element, numbers(random, kVocabulary * kHidden, 1.0f));
    model.final_norm = ones(kHidden);
    model.lm_head = matrix_of(random, one, kVocabulary, kHidden);
    return model;
}

void print(const std::string& name, const std::vector<float>& values) {
    std::printf("%s", name.c_str());
    for (float value : values) std::printf(" %.9g", double(value));
    std::printf("\n");
}

void print(const std::string& name, int element, const void* values, size_t size) {
    std::vector<float> wide(size);
    for (size_t i = 0; i < size; ++i) wide[i] = element_at(element, values, i);
    print(name, wide);
}

// A text read into a cache of its own.
struct Text {
    const Model& model;
    void* space;
    void* caches[kNumLayers];

    explicit Text(const Model& model) : model(model) {
        space = polybasic_new_workspace(&model, kCapacity);
        for (void*& cache : caches) {
            const size_t size = size_t(2) * kKeyHeads * kCapacity * kHead * bytes_of(model.element);
            cache = allocate<char>(size);
        }
    }

    void read(const Rows& rows, const std::vector<int64_t>& tokens, void* states, int threads) {
        const Sequence sequence{rows, caches, kCapacity, 0, 0};
        Pass pass{};
        pass.input = {tokens.data(), &sequence, 1, rows.num_rows};
        pass.states = states;
        polybasic_pass(&model, &pass, space, threads);
    }

    ~Text() {
        polybasic_delete_workspace(space);
        for (void* cache : caches) std::free(cache);
    }
};

void run_products(const Case& one, int threads, const std::string& name) {
    constexpr int kRows = 31, kInputs = 256, kOutputs = 104;
    Random random{3};
    const Matrix matrix = matrix_of(random, one, kOutputs, kInputs);
    const void* rows = elements(one.element, numbers(random, kRows * kInputs, 1.0f));
    float* memory = allocate<float>(kRows * kInputs * 2 + 64);
    char* out = allocate<char>(kRows * kOutputs * sizeof(float));
    const size_t in_bytes = kInputs * bytes_of(one.element);
    const size_t out_bytes = kOutputs * bytes_of(one.element);
    for (int num : {1, 5, 24, kRows}) {
        for (int first = 0; first < kRows; first += num)
            polybasic_product(&matrix, one.element, static_cast<const char*>(rows) + first * in_bytes,
                              out + first * out_bytes, std::min(num, kRows - first), memory, nullptr, threads);
        print(name + "/product/" + std::to_string(num), one.element, out, kRows * kOutputs);
    }
}

void run_passes(const Case& one, int threads, const std::string& name) {
    const Model model = model_of(one);
    Random random{11};
    std::vector<int64_t> prompt(kPrompt);
    for (int64_t& token : prompt) token = random.bits() % kVocabulary;
    char* states = allocate<char>(kPrompt * kHidden * sizeof(float));
    const size_t row_bytes = kHidden * bytes_of(one.element);
    {
        Text text(model);
        for (int row = 0; row < kPrompt; ++row)
            text.read(Rows{1, row, row, nullptr, nullptr}, {prompt[row]}, states + row * row_bytes,
                      threads);
        print(name + "/text/1", one.element, states, kPrompt * kHidden);
    }
    Text text(model);
    text.read(Rows{kPrompt, 0, 0, nullptr, nullptr}, prompt, states, threads);
    print(name + "/text/37", one.element, states, kPrompt * kHidden);

    // a tree of ten rows after the prompt, and the path to each as a text
    const int parents[] = {-1, 0, 0, 1, 1, 2, 4, 6, 5, 7};
    constexpr int kRows = 10;
    std::vector<int32_t> ends, paths;
    std::vector<std::vector<int64_t>> texts;
    std::vector<int64_t> tokens;
    for (int row = 0; row < kRows; ++row) {
        tokens.push_back(20 + row);
        std::vector<int32_t> path;
        for (int at = row; at >= 0; at = parents[at]) path.insert(path.begin(), at);
        texts.emplace_back();
        for (int32_t at : path) {
            paths.push_back(kPrompt + at);
            texts.back().push_back(20 + at);
        }
        ends.push_back(int32_t(paths.size()));
    }
    text.read(Rows{kRows, kPrompt, kPrompt, ends.data(), paths.data()}, tokens, states, threads);
    print(name + "/tree/10", one.element, states, kRows * kHidden);
    char* last = allocate<char>(kRows * kHidden * sizeof(float));
    for (int row = 0; row < kRows; ++row) {
        const int length = int(texts[row].size());
        text.read(Rows{length, kPrompt, kPrompt, nullptr, nullptr}, texts[row], states, threads);
        std::memcpy(last + row * row_bytes, states + (length - 1) * row_bytes, row_bytes);
    }
    print(name + "/tree/1", one.element, last, kRows * kHidden);

    // what a draft of the model itself finds after the prompt
    constexpr int kDepth = 3, kBeam = 4, kNum = kBeam + (kDepth - 1) * kBeam * kBeam;
    std::vector<int64_t> drafted(kNum), beams((kDepth - 1) * kBeam);
    std::vector<float> scores(kNum);
    int32_t num_levels = kDepth;
    DraftShape shape{};
    shape.depth = kDepth;
    shape.num_levels = &num_levels;
    shape.least_score = -INFINITY;
    shape.top_k = kBeam;
    shape.start = kPrompt;
    shape.capacity = kCapacity;
    shape.caches = text.caches;
    shape.state = last;
    shape.tokens = drafted.data();
    shape.scores = scores.data();
    shape.beams = beams.data();
    polybasic_drafts(&model, &shape, 1, text.space, threads);
    print(name + "/draft/scores", scores);
    print(name + "/draft/tokens", std::vector<float>(drafted.begin(), drafted.end()));
}

// As tests/chain/kernels/cpu/test_processors.py asks the reference for.
void run_noise(int threads) {
    constexpr int kTokens = 1000;
    const int64_t key[] = {3, 0, 0}, positions[] = {0, 7408, 4294967295};
    std::vector<float> found(3 * kTokens);
    polybasic_noise(key, positions, 3, kTokens, found.data(), threads);
    print("noise/" + std::to_string(threads), found);
}

}  // namespace

int main() {
    polybasic_use_openmp(reinterpret_cast<void*>(parallel), reinterpret_cast<void*>(thread_number),
                         reinterpret_cast<void*>(num_threads));
    const Case cases[] = {{"float32", kFloat32, kFloat32},
                          {"bfloat16", kBfloat16, kBfloat16},
                          {"int4-float32", kFloat32, kInt4},
                          {"int4-bfloat16", kBfloat16, kInt4},
                          {"blocks4-float32", kFloat32, kBlocks4},
                          {"blocks5-float32", kFloat32, kBlocks5},
                          {"blocks8-float32", kFloat32, kBlocks8},
                          {"nested4-float32", kFloat32, kBlocks4, true},
                          {"nested6-float32", kFloat32, kBlocks6, true}};
    for (const Case& one : cases)
        for (int threads : {1, 2}) {
            const std::string name = std::string(one.name) + "/" + std::to_string(threads);
            run_products(one, threads, name);
            run_passes(one, threads, name);
        }
    for (int threads : {1, 2}) run_noise(threads);
}
