#include "client.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <cstdlib>

namespace kvsidecar {
namespace {

// A dead worker is noticed within 40 s while a call is open. Pings must not come faster than the worker permits.
constexpr int kPingEveryMs = 30'000, kPatienceMs = 10'000;

// The two messages of google.rpc that an error consists of, read field by field so that no further package is needed:
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
  switch (code) {  // what has no details was not said by the worker but by gRPC on either side
    case grpc::StatusCode::CANCELLED: return "CANCELLED";
    case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
    case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
    case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_REQUEST";
    default: return "INTERNAL";
  }
}

void expire(grpc::ClientContext& context, Deadline deadline) {
  if (deadline) context.set_deadline(std::chrono::system_clock::now() + *deadline);
}

void check(const grpc::Status& status) {
  if (!status.ok()) throw Error(status);
}

}  // namespace

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

Client::Client(const std::string& target) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingEveryMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPatienceMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  stub_ = pb::InferenceService::NewStub(
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
}

pb::GenerateResponse Client::generate(const pb::GenerateRequest& request, Deadline deadline) {
  grpc::ClientContext context;
  expire(context, deadline);
  pb::GenerateResponse response;
  check(stub_->Generate(&context, request, &response));
  return response;
}

void Client::stream(const pb::GenerateRequest& request,
                    const std::function<bool(const pb::GenerateStreamResponse&)>& each, Deadline deadline) {
  grpc::ClientContext context;  // one that is destroyed with its call open cancels it
  expire(context, deadline);
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

pb::WarmResponse Client::warm(const pb::Prompt& prompt, Deadline deadline) {
  grpc::ClientContext context;
  expire(context, deadline);
  pb::WarmRequest request;
  *request.mutable_prompt() = prompt;
  pb::WarmResponse response;
  check(stub_->Warm(&context, request, &response));
  return response;
}

}  // namespace kvsidecar
