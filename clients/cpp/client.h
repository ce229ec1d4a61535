// A client of an inference worker of KVSidecar.
//
// Requests and answers are the generated messages of kvsidecar.inference.v1, whose fields document units and
// defaults. Failed calls throw kvsidecar::Error.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvsidecar/inference/v1/inference.grpc.pb.h"

namespace kvsidecar {

namespace pb = inference::v1;
using Deadline = std::optional<std::chrono::milliseconds>;  // time from now; none: no limit
constexpr uint32_t kRestOfContext = UINT32_MAX;  // as max_tokens: an answer may fill the rest of the context

// A call that failed. `reason` is stable and meant for programs, such as "INVALID_REQUEST" or "OVERLOADED"
// (clients/python/kvsidecar/errors has all reasons). what() is one sentence for people.
class Error : public std::runtime_error {
 public:
  // Reads google.rpc.ErrorInfo from a call's status (https://google.aip.dev/193).
  explicit Error(const grpc::Status& status);

  grpc::StatusCode code;
  std::string reason;
  std::string domain;
};

// One message of a conversation: a role ("system", "user", "assistant") and its text.
struct Message {
  std::string role, content;
};

// A conversation, rendered with the model's template.
pb::Prompt chat(const std::vector<Message>& messages);

// Plain text without a chat template: a chat model continues it instead of answering it.
pb::Prompt text(const std::string& text);

// The first worker of `kvsidecar serve`.
std::string default_target();

// Thread-safe client. Before it sends a request, it refuses negative numbers, which C++ converts: set_max_tokens(-3)
// sets 4294967293.
class Client {
 public:
  // "unix:/PATH" or "host:port". Connects at first use. Throws Error for the URL of a gateway.
  explicit Client(const std::string& target = default_target());

  // Returns the complete answer.
  pb::GenerateResponse generate(const pb::GenerateRequest& request, Deadline deadline = {});

  // Calls `each` with every chunk; the last chunk has finish_reason, usage and timings. When `each` returns false or
  // throws, the request ends at the worker. After false, stream throws Error with reason CANCELLED.
  void stream(const pb::GenerateRequest& request, const std::function<bool(const pb::GenerateStreamResponse&)>& each,
              Deadline deadline = {});

  // Prefills a prompt into the cache, and returns when the daemon has stored it. `cache` has hints, such as a session.
  pb::WarmResponse warm(const pb::Prompt& prompt, Deadline deadline = {}, const pb::CacheOptions& cache = {});

  // Loads stored chunks of a prompt into the daemon's memory, without computing.
  pb::WarmResponse prefetch(const pb::Prompt& prompt, Deadline deadline = {});

  // Removes the chunks that only this session of the tenant has used. Returns their number.
  uint32_t release_session(const std::string& session, const std::string& tenant_salt = "", Deadline deadline = {});

  // Every method of the service, for methods that this class does not wrap.
  pb::InferenceService::Stub& stub() { return *stub_; }

 private:
  // Sets the deadline of a call. If the worker was away, waits briefly for a connection.
  void prepare(grpc::ClientContext& context, Deadline deadline) const;
  void check(const grpc::Status& status) const;
  pb::WarmResponse send(const pb::WarmRequest& request, Deadline deadline);

  std::string target_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<pb::InferenceService::Stub> stub_;
};

}  // namespace kvsidecar
