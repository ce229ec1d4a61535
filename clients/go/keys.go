package kvsidecar

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"

	cache "kvsidecar/gen/kvsidecar/cache/v1"
)

// Hash is a key of the cache. The specification is protos/kvsidecar/cache/v1/chunk.proto.
type Hash = [sha256.Size]byte

var escaped = strings.NewReplacer(`\`, `\\`, "\n", `\n`)

// CanonicalEncoding is the hash input of a namespace id: one line per field, in the order of field numbers.
func CanonicalEncoding(d *cache.NamespaceDescriptor) string {
	return fmt.Sprintf(
		"model_fingerprint=%s\narchitecture=%s\nlayers=%d\nkv_heads=%d\nhead_dim=%d\ndtype=%d\nrope_parameters=%s\n"+
			"format_version=%d\nquantizer_version=%d\nbits=%d\nlora_adapter=%s\ntensor_parallel_rank=%d\n"+
			"tensor_parallel_size=%d\nproducer=%s\n",
		hex.EncodeToString(d.ModelFingerprint), escaped.Replace(d.Architecture), d.Layers, d.KvHeads, d.HeadDim, d.Dtype,
		escaped.Replace(d.RopeParameters), d.FormatVersion, d.QuantizerVersion, d.Bits, escaped.Replace(d.LoraAdapter),
		d.TensorParallelRank, d.TensorParallelSize, escaped.Replace(d.Producer),
	)
}

// NamespaceID identifies everything that determines a chunk's bytes.
func NamespaceID(d *cache.NamespaceDescriptor) Hash {
	return hash("namespace", sized([]byte(CanonicalEncoding(d))))
}

// TenantRoot is the root of a tenant's chunks in a namespace.
func TenantRoot(namespace Hash, salt []byte) Hash { return hash("root", namespace[:], sized(salt)) }

// TenantID identifies a tenant across namespaces.
func TenantID(salt []byte) Hash { return hash("tenant", sized(salt)) }

// PrefixHash identifies a chunk together with its whole prefix; the first chunk's parent is the tenant root.
func PrefixHash(parent Hash, tokens []uint32) Hash { return hash("prefix", parent[:], counted(tokens)) }

// ContentHash identifies a chunk's tokens, independent of their position.
func ContentHash(root Hash, tokens []uint32) Hash { return hash("content", root[:], counted(tokens)) }

// HeadHash is the key of a prompt's first tokens in the index summary.
func HeadHash(root Hash, tokens []uint32) Hash { return hash("head", root[:], counted(tokens)) }

func hash(purpose string, parts ...[]byte) Hash {
	digest := sha256.New()
	digest.Write([]byte("kvsidecar/2/" + purpose))
	for _, part := range parts {
		digest.Write(part)
	}
	return *(*Hash)(digest.Sum(nil))
}

func sized(part []byte) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(part))), part...)
}

func counted(tokens []uint32) []byte {
	packed := binary.LittleEndian.AppendUint32(nil, uint32(len(tokens)))
	for _, token := range tokens {
		packed = binary.LittleEndian.AppendUint32(packed, token)
	}
	return packed
}
