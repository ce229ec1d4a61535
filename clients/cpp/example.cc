// Asks a chat question and streams the answer, then asks again: the second time the prompt comes from the cache.
// Run it against `kvsidecar serve`; an argument names another worker ("unix:/PATH" or "host:port").
#include <iostream>

#include "client.h"

namespace {

void answer(kvsidecar::Client& client, const kvsidecar::pb::GenerateRequest& request) {
  const auto show = [](const kvsidecar::pb::GenerateStreamResponse& part) {
    std::cout << part.text() << std::flush;
    if (part.has_usage()) {
      std::cout << "\n[" << part.usage().prompt_tokens() << " prompt tokens, " << part.usage().cached_tokens()
                << " from the cache]\n";
    }
    return true;  // false would cancel
  };
  client.stream(request, show, std::chrono::seconds(60));
}

}  // namespace

int main(int count, char** arguments) {
  kvsidecar::pb::GenerateRequest request;
  *request.mutable_prompt() = kvsidecar::chat({{"user", "What is the capital of Germany?"}});
  request.set_max_tokens(24);
  try {
    kvsidecar::Client client(count > 1 ? arguments[1] : kvsidecar::default_target());
    answer(client, request);
    answer(client, request);
  } catch (const kvsidecar::Error& error) {
    if (error.reason == "UNAVAILABLE") std::cerr << "no worker is there; start one with: kvsidecar serve\n";
    std::cerr << error.reason << ": " << error.what() << "\n";
    return 1;
  }
}
