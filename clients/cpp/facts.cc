// Prints this client's view of a worker, one fact per line, for tests/clients: facts TARGET TEXT.
// Without a TEXT it prints its view of tests/clients/scripted_worker.py; without arguments the hashes of
// docs/protocol.md's test vectors, and checksums by length.
#include <iomanip>
#include <iostream>
#include <sstream>
#include <thread>

#include "client.h"
#include "keys.h"

using kvsidecar::hex;
namespace pb = kvsidecar::pb;

namespace {

constexpr int kMost = 400;

template <class T>
void fact(const std::string& name, const T& value) {
  std::cout << name << "\t" << value << "\n";
}

pb::GenerateRequest greedy(const std::string& text, int most) {
  pb::GenerateRequest request;
  *request.mutable_prompt() = kvsidecar::text(text);
  request.set_max_tokens(most);
  request.mutable_sampling()->set_temperature(0);
  request.set_ignore_eos(true);
  return request;
}

void asked(kvsidecar::Client& client, const std::string& text) {
  fact("warm.stored_tokens", client.warm(kvsidecar::text(text)).stored_tokens());
  const auto whole = client.generate(greedy(text, 12));
  fact("generate.text", hex(whole.text()));
  fact("generate.prompt_tokens", whole.usage().prompt_tokens());
  fact("generate.cached_tokens", whole.usage().cached_tokens());
  std::string streamed;
  int pieces = 0;
  client.stream(greedy(text, 12), [&](const pb::GenerateStreamResponse& part) {
    streamed += part.text();
    ++pieces;
    if (part.has_usage()) fact("stream.generated_tokens", part.usage().generated_tokens());
    return true;
  });
  fact("stream.text", hex(streamed));
  fact("stream.pieces", pieces);
  pb::GenerateRequest question = greedy("", 8);
  *question.mutable_prompt() = kvsidecar::chat({{"user", text}});
  question.set_explain(true);
  const pb::GenerateResponse answer = client.generate(question);
  fact("chat.text", hex(answer.text()));
  fact("chat.reasoning", hex(answer.reasoning()));
  fact("chat.miss", answer.miss().kind());
}

void failure(const std::string& name, const std::function<void()>& call) {
  try {
    call();
    fact(name + ".reason", "none");
  } catch (const kvsidecar::Error& error) {
    fact(name + ".reason", error.reason);
    fact(name + ".code", static_cast<int>(error.code));
    fact(name + ".message", error.what());
    fact(name + ".domain", error.domain);
  }
}

void hinted(kvsidecar::Client& client, const std::string& text) {
  const auto own = kvsidecar::text("An agent's own notes: " + text);
  pb::CacheOptions cache;
  cache.set_session("agent");
  cache.set_retain_seconds(60);
  cache.set_priority(pb::CACHE_PRIORITY_LOW);
  auto* point = cache.add_breakpoints();
  point->set_tokens(64);
  point->set_retain_seconds(300);
  client.warm(own, {}, cache);
  fact("prefetch.stored_tokens", client.prefetch(kvsidecar::text(text)).stored_tokens());
  fact("session.released_chunks", client.release_session("agent"));
  cache.set_retain_seconds(0);
  failure("no retention", [&] { client.warm(own, {}, cache); });
}

void ended(kvsidecar::Client& client) {
  failure("cancel", [&] {
    client.stream(greedy("cancelled after its first piece", kMost),
                  [](const pb::GenerateStreamResponse&) { return false; });
  });
  failure("deadline", [&] {
    client.generate(greedy("more than can be said in a moment", kMost), std::chrono::milliseconds(50));
  });
  failure("refused", [&] { client.generate(greedy("nothing may be asked for", 0)); });
  failure("negative", [&] { client.generate(greedy("less than nothing", -3)); });
  pb::GenerateRequest request = greedy("less than nothing", 4);
  request.mutable_sampling()->set_top_k(-3);
  failure("negative in a stream", [&] { client.stream(request, [](const auto&) { return true; }); });
  request = greedy("less than nothing", 4);
  request.mutable_cache()->add_breakpoints()->set_tokens(-3);
  failure("negative in a breakpoint", [&] { client.generate(request); });
  request = greedy("less than nothing", 4);
  request.add_stop_token_ids(-3);
  failure("negative in a list", [&] { client.generate(request); });
}

std::string hexadecimal(uint64_t value) {
  std::ostringstream out;
  out << std::hex << std::setw(16) << std::setfill('0') << value;
  return out.str();
}

void until_answered(kvsidecar::Client& client) {
  while (true) {
    try {
      client.generate(greedy("short", 1));
      return;
    } catch (const kvsidecar::Error& error) {
      if (error.reason != "UNAVAILABLE") throw;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// Ends a stream at the chunk with this text, when the whole stream has arrived.
void stopped(kvsidecar::Client& client, const std::string& last) {
  std::string seen;
  failure("stopped at " + last, [&] {
    client.stream(greedy("stream", 3), [&](const pb::GenerateStreamResponse& part) {
      seen += (seen.empty() ? "" : " ") + part.text();
      if (part.text() == last) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return part.text() != last;
    });
  });
  fact("stopped at " + last + ".seen", seen);
}

void scripted(kvsidecar::Client& client) {
  until_answered(client);
  std::string text;
  failure("long", [&] { text = client.generate(greedy("long", 1)).text(); });
  fact("long.checksum", hexadecimal(kvsidecar::checksum(text)));
  failure("rest of context", [&] { client.generate(greedy("rest of context", -1)); });
  pb::GenerateRequest request = greedy("top_k", 1);
  request.mutable_sampling()->set_top_k(-1);
  failure("largest top_k", [&] { client.generate(request); });
  stopped(client, "0");
  stopped(client, "2");
}

void vectors() {
  std::string bytes;
  for (int i = 0; i < 4096; ++i) bytes += static_cast<char>(i);
  kvsidecar::cache::v1::NamespaceDescriptor descriptor;
  descriptor.set_model_fingerprint(bytes.substr(0, 32));
  descriptor.set_architecture("Qwen2ForCausalLM");
  descriptor.set_layers(24);
  descriptor.set_kv_heads(2);
  descriptor.set_head_dim(64);
  descriptor.set_dtype(kvsidecar::cache::v1::DATA_TYPE_BFLOAT16);
  descriptor.set_rope_parameters(R"({"rope_theta": 1000000.0})");
  descriptor.set_format_version(2);
  descriptor.set_bits(16);
  descriptor.set_tensor_parallel_size(1);
  descriptor.set_producer("example/1 with \\ and\nnewline");
  const auto name_space = kvsidecar::namespace_id(descriptor);
  const auto root = kvsidecar::tenant_root(name_space, "");
  const kvsidecar::Tokens tokens{1, 2, 3, 70000};
  const auto first = kvsidecar::prefix_hash(root, tokens);
  fact("namespace", hex(name_space));
  fact("root of the empty salt", hex(root));
  fact("root of the salt `salt`", hex(kvsidecar::tenant_root(name_space, "salt")));
  fact("tenant id of the empty salt", hex(kvsidecar::tenant_id("")));
  fact("tenant id of the salt `salt`", hex(kvsidecar::tenant_id("salt")));
  fact("prefix_hash of the tokens 1, 2, 3, 70000 under the empty salt's root", hex(first));
  fact("prefix_hash of the token 4294967295 after that", hex(kvsidecar::prefix_hash(first, {4294967295u})));
  fact("content_hash of 1, 2, 3, 70000 under that root", hex(kvsidecar::content_hash(root, tokens)));
  fact("head hash of 1, 2, 3, 70000 under that root", hex(kvsidecar::head_hash(root, tokens)));
  fact("checksum (XXH3-64) of the bytes 0 to 255", hexadecimal(kvsidecar::checksum(bytes.substr(0, 256))));
  for (const size_t n : {0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 1024, 1025, 4096})
    fact("checksum." + std::to_string(n), hexadecimal(kvsidecar::checksum(bytes.substr(0, n))));
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    vectors();
    return 0;
  }
  kvsidecar::Client client(arguments[1]);
  if (count < 3) {
    scripted(client);
    return 0;
  }
  asked(client, arguments[2]);
  hinted(client, arguments[2]);
  ended(client);
}
