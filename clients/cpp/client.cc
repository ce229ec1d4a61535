#include "client.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>

namespace kvsidecar {
namespace {

// Keepalive: detects a dead worker within 40 s while a call is open. The worker limits the ping rate.
constexpr int kPingEveryMs = 30'000, kPatienceMs = 10'000;
// In recent versions of gRPC, a hung process has this timeout, by default 60 s. Version 1.51 has no macro for it.
constexpr char kPingTimeoutMs[] = "grpc.http2.ping_timeout_ms";
// Finds a worker that was away within a second; by default, gRPC waits up to two minutes between attempts.
constexpr int kFirstBackoffMs = 100, kMaxBackoffMs = 1'000;
// A call that fails at once does not poll the connection that is being established, which gRPC then polls every 5 s.
constexpr std::chrono::milliseconds kReconnectWait{100};
// A long answer with logprobs exceeds gRPC's default of 4 MiB.
constexpr int kMaxReceiveBytes = 64 << 20;

// Reads a field of the two google.rpc messages of an error by its number, so that no further package is needed:
// Status{code = 1, message = 2, details = 3: Any{type_url = 1, value = 2}}, ErrorInfo{reason = 1, domain = 2}.
std::string field(const std::string& message, int wanted) {
  std::string found;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0; at < message.size() && shift < 64; shift += 7) {
      const auto byte = static_cast<unsigned char>(message[at++]);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) break;
    }
    return value;
  };
  while (at < message.size()) {
    const uint64_t tag = varint(), length = varint();
    if (tag % 8 == 0) continue;  // a number, which is read
    if (tag % 8 != 2 || length > message.size() - at) break;
    if (tag / 8 == static_cast<uint64_t>(wanted)) found = message.substr(at, length);
    at += length;
  }
  return found;
}

std::string reason_of(grpc::StatusCode code) {
  switch (code) {  // an error without details comes from gRPC on either side, not from the worker
    case grpc::StatusCode::CANCELLED: return "CANCELLED";
    case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
    case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_REQUEST";
    default: return "INTERNAL";
  }
}

// An error of the client itself, without a call.
Error refusal(const std::string& message) { return Error(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, message)); }

Error is_http(const std::string& target) {
  return refusal(target + " is an HTTP address, such as the gateway's; give a worker's gRPC: its socket (unix:/PATH) or HOST:PORT");
}

// Refuses a number that exceeds an int32, because it was probably negative before the conversion to unsigned. A
// max_tokens of kRestOfContext is allowed.
void refuse_negative(const std::string& name, uint32_t value) {
  if (value <= INT32_MAX || (name == "max_tokens" && value == kRestOfContext)) return;
  const bool positive = name == "max_tokens" || name == "ttl_seconds" || name == "retain_seconds";
  throw refusal(name + " is " + std::to_string(static_cast<int32_t>(value)) + "; whole numbers from " +
                (positive ? "1" : "0") + " to " + std::to_string(INT32_MAX) + " are allowed");
}

// Refuses such numbers in all fields of a message, except the keys of maps.
void refuse_negative(const google::protobuf::Message& message) {
  using Field = google::protobuf::FieldDescriptor;
  const auto* reflection = message.GetReflection();
  std::vector<const Field*> fields;
  reflection->ListFields(message, &fields);
  for (const Field* field : fields) {
    if (field->is_map()) continue;
    const bool several = field->is_repeated();
    const int count = several ? reflection->FieldSize(message, field) : 1;
    for (int i = 0; i < count; ++i) {
      if (field->cpp_type() == Field::CPPTYPE_MESSAGE) {
        refuse_negative(several ? reflection->GetRepeatedMessage(message, field, i)
                                : reflection->GetMessage(message, field));
      } else if (field->cpp_type() == Field::CPPTYPE_UINT32) {
        refuse_negative(std::string(field->name()), several ? reflection->GetRepeatedUInt32(message, field, i)
                                                            : reflection->GetUInt32(message, field));
      }
    }
  }
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

}  // namespace

pb::Prompt chat(const std::vector<Message>& messages) {
  pb::Prompt prompt;
  for (const Message& message : messages) {
    auto* added = prompt.mutable_chat()->add_messages();
    added->set_role(message.role);
    added->set_content(message.content);
  }
  return prompt;
}

pb::Prompt text(const std::string& text) {
  pb::Prompt prompt;
  prompt.set_text(text);
  return prompt;
}

Error::Error(const grpc::Status& status)
    : std::runtime_error(status.error_message()), code(status.error_code()), reason(reason_of(status.error_code())) {
  const std::string detail = field(status.error_details(), 3);
  const std::string type = field(detail, 1), info = field(detail, 2);
  if (type == "type.googleapis.com/google.rpc.ErrorInfo") {
    reason = field(info, 1);
    domain = field(info, 2);
  }
}

std::string default_target() {
  const auto set = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  std::string folder = set("KVSIDECAR_RUNTIME_DIR");
  if (folder.empty()) {
    const std::string base = set("XDG_RUNTIME_DIR");
    folder = base.empty() ? "/tmp/kvsidecar-" + std::to_string(getuid()) : base + "/kvsidecar";
  }
  return "unix:" + folder + "/worker-0.sock";
}

Client::Client(const std::string& target) : target_(target) {
  if (starts_with(target, "http:") || starts_with(target, "https:")) throw is_http(target);
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingEveryMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPatienceMs);
  arguments.SetInt(kPingTimeoutMs, kPatienceMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kFirstBackoffMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kMaxBackoffMs);
  arguments.SetMaxReceiveMessageSize(kMaxReceiveBytes);
  channel_ = grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  stub_ = pb::InferenceService::NewStub(channel_);
}

void Client::prepare(grpc::ClientContext& context, Deadline deadline) const {
  const auto now = std::chrono::system_clock::now();
  if (deadline) context.set_deadline(now + *deadline);
  if (channel_->GetState(false) == GRPC_CHANNEL_TRANSIENT_FAILURE) {
    channel_->WaitForStateChange(GRPC_CHANNEL_TRANSIENT_FAILURE, std::min(context.deadline(), now + kReconnectWait));
  }
}

void Client::check(const grpc::Status& status) const {
  // gRPC's text for an answer that begins with "HTTP/1".
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE &&
      status.error_message().find("http1.x server") != std::string::npos) {
    throw is_http(target_);
  }
  if (!status.ok()) throw Error(status);
}

pb::GenerateResponse Client::generate(const pb::GenerateRequest& request, Deadline deadline) {
  refuse_negative(request);
  grpc::ClientContext context;
  prepare(context, deadline);
  pb::GenerateResponse response;
  check(stub_->Generate(&context, request, &response));
  return response;
}

void Client::stream(const pb::GenerateRequest& request,
                    const std::function<bool(const pb::GenerateStreamResponse&)>& each, Deadline deadline) {
  refuse_negative(request);
  grpc::ClientContext context;  // its destruction cancels a call that is still open
  prepare(context, deadline);
  pb::GenerateStreamRequest wrapped;
  *wrapped.mutable_request() = request;
  const auto reader = stub_->GenerateStream(&context, wrapped);
  pb::GenerateStreamResponse part;
  try {
    while (reader->Read(&part)) {
      if (!each(part)) {
        context.TryCancel();
        break;
      }
    }
  } catch (...) {
    context.TryCancel();
    reader->Finish();
    throw;
  }
  check(reader->Finish());
}

pb::WarmResponse Client::send(const pb::WarmRequest& request, Deadline deadline) {
  refuse_negative(request);
  grpc::ClientContext context;
  prepare(context, deadline);
  pb::WarmResponse response;
  check(stub_->Warm(&context, request, &response));
  return response;
}

pb::WarmResponse Client::warm(const pb::Prompt& prompt, Deadline deadline, const pb::CacheOptions& cache) {
  pb::WarmRequest request;
  *request.mutable_prompt() = prompt;
  *request.mutable_cache() = cache;
  return send(request, deadline);
}

pb::WarmResponse Client::prefetch(const pb::Prompt& prompt, Deadline deadline) {
  pb::WarmRequest request;
  *request.mutable_prompt() = prompt;
  request.set_prefetch(true);
  return send(request, deadline);
}

uint32_t Client::release_session(const std::string& session, const std::string& tenant_salt, Deadline deadline) {
  grpc::ClientContext context;
  prepare(context, deadline);
  pb::ReleaseSessionRequest request;
  request.set_session(session);
  request.set_tenant_salt(tenant_salt);
  pb::ReleaseSessionResponse response;
  check(stub_->ReleaseSession(&context, request, &response));
  return response.released_chunks();
}

}  // namespace kvsidecar
