#include "keys.h"

#include <openssl/sha.h>
#include <xxhash.h>

namespace kvsidecar {
namespace {

std::string little_endian(uint32_t value) {
  std::string packed;
  for (int shift = 0; shift < 32; shift += 8) packed += static_cast<char>(value >> shift & 0xff);
  return packed;
}

std::string sized(std::string_view part) {
  return little_endian(static_cast<uint32_t>(part.size())) + std::string(part);
}

std::string counted(const Tokens& tokens) {
  std::string packed = little_endian(static_cast<uint32_t>(tokens.size()));
  for (const uint32_t token : tokens) packed += little_endian(token);
  return packed;
}

std::string bytes(const Hash& hash) { return {hash.begin(), hash.end()}; }

Hash hashed(const std::string& purpose, const std::string& parts) {
  const std::string whole = "kvsidecar/2/" + purpose + parts;
  Hash digest;
  SHA256(reinterpret_cast<const unsigned char*>(whole.data()), whole.size(), digest.data());
  return digest;
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') out += "\\\\";
    else if (c == '\n') out += "\\n";
    else out += c;
  }
  return out;
}

}  // namespace

std::string canonical_encoding(const cache::v1::NamespaceDescriptor& d) {
  std::string out;
  const auto text = [&](const char* name, const std::string& value) { out += std::string(name) + "=" + value + "\n"; };
  const auto number = [&](const char* name, uint64_t value) { text(name, std::to_string(value)); };
  text("model_fingerprint", hex(d.model_fingerprint()));
  text("architecture", escaped(d.architecture()));
  number("layers", d.layers());
  number("kv_heads", d.kv_heads());
  number("head_dim", d.head_dim());
  number("dtype", d.dtype());
  text("rope_parameters", escaped(d.rope_parameters()));
  number("format_version", d.format_version());
  number("quantizer_version", d.quantizer_version());
  number("bits", d.bits());
  text("lora_adapter", escaped(d.lora_adapter()));
  number("tensor_parallel_rank", d.tensor_parallel_rank());
  number("tensor_parallel_size", d.tensor_parallel_size());
  text("producer", escaped(d.producer()));
  return out;
}

Hash namespace_id(const cache::v1::NamespaceDescriptor& descriptor) {
  return hashed("namespace", sized(canonical_encoding(descriptor)));
}

Hash tenant_root(const Hash& name_space, std::string_view salt) {
  return hashed("root", bytes(name_space) + sized(salt));
}

Hash tenant_id(std::string_view salt) { return hashed("tenant", sized(salt)); }

Hash prefix_hash(const Hash& parent, const Tokens& tokens) {
  return hashed("prefix", bytes(parent) + counted(tokens));
}

Hash content_hash(const Hash& root, const Tokens& tokens) { return hashed("content", bytes(root) + counted(tokens)); }

Hash head_hash(const Hash& root, const Tokens& tokens) { return hashed("head", bytes(root) + counted(tokens)); }

uint64_t checksum(std::string_view payload) { return XXH3_64bits(payload.data(), payload.size()); }

std::string hex(std::string_view bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const char c : bytes) {
    out += kDigits[static_cast<unsigned char>(c) >> 4];
    out += kDigits[c & 0xf];
  }
  return out;
}

std::string hex(const Hash& hash) { return hex(bytes(hash)); }

}  // namespace kvsidecar
