// Prints this client's view of a worker, one fact per line, for tests/clients: facts TARGET TEXT. Without a TEXT it
// prints its view of tests/clients/scripted_worker.py; without arguments the hashes of docs/protocol.md's test vectors,
// and checksums by length.
package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"kvsidecar"
	cache "kvsidecar/gen/kvsidecar/cache/v1"
	pb "kvsidecar/gen/kvsidecar/inference/v1"
)

var longest = uint32(400)

func main() {
	if len(os.Args) == 1 {
		vectors()
		return
	}
	client, err := kvsidecar.Dial(os.Args[1])
	must(err)
	defer client.Close()
	if len(os.Args) == 2 {
		scripted(client)
		return
	}
	asked(client, os.Args[2])
	hinted(client, os.Args[2])
	ended(client)
}

func fact(name string, value any) { fmt.Printf("%s\t%v\n", name, value) }

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func greedy(text string, most uint32) *pb.GenerateRequest {
	zero := float32(0)
	return &pb.GenerateRequest{
		Prompt: kvsidecar.Text(text), MaxTokens: &most, Sampling: &pb.Sampling{Temperature: &zero}, IgnoreEos: true,
	}
}

func asked(client *kvsidecar.Client, text string) {
	ctx := context.Background()
	warmed, err := client.Warm(ctx, kvsidecar.Text(text))
	must(err)
	fact("warm.stored_tokens", warmed.StoredTokens)
	whole, err := client.Generate(ctx, greedy(text, 12))
	must(err)
	fact("generate.text", hex.EncodeToString([]byte(whole.Text)))
	fact("generate.prompt_tokens", whole.Usage.PromptTokens)
	fact("generate.cached_tokens", whole.Usage.CachedTokens)
	streamed, pieces := "", 0
	must(client.Stream(ctx, greedy(text, 12), func(part *pb.GenerateStreamResponse) error {
		streamed, pieces = streamed+part.Text, pieces+1
		if part.Usage != nil {
			fact("stream.generated_tokens", part.Usage.GeneratedTokens)
		}
		return nil
	}))
	fact("stream.text", hex.EncodeToString([]byte(streamed)))
	fact("stream.pieces", pieces)
	question := greedy("", 8)
	question.Prompt = kvsidecar.Chat(&pb.ChatMessage{Role: "user", Content: text})
	question.Explain = true
	answer, err := client.Generate(ctx, question)
	must(err)
	fact("chat.text", hex.EncodeToString([]byte(answer.Text)))
	fact("chat.reasoning", hex.EncodeToString([]byte(answer.Reasoning)))
	fact("chat.miss", answer.GetMiss().GetKind())
}

func hinted(client *kvsidecar.Client, text string) {
	ctx, seconds, own := context.Background(), uint32(60), kvsidecar.Text("An agent's own notes: "+text)
	point := &pb.CacheBreakpoint{End: &pb.CacheBreakpoint_Tokens{Tokens: 64}, RetainSeconds: 300}
	cache := &pb.CacheOptions{
		Session: "agent", RetainSeconds: &seconds, Breakpoints: []*pb.CacheBreakpoint{point},
		Priority: pb.CachePriority_CACHE_PRIORITY_LOW,
	}
	_, err := client.WarmWith(ctx, own, cache)
	must(err)
	found, err := client.Prefetch(ctx, kvsidecar.Text(text))
	must(err)
	fact("prefetch.stored_tokens", found.StoredTokens)
	released, err := client.ReleaseSession(ctx, "agent", nil)
	must(err)
	fact("session.released_chunks", released)
	zero := uint32(0)
	_, err = client.WarmWith(ctx, own, &pb.CacheOptions{RetainSeconds: &zero})
	failure("no retention", err)
}

func ended(client *kvsidecar.Client) {
	ctx, cancel := context.WithCancel(context.Background())
	err := client.Stream(ctx, greedy("cancelled after its first piece", longest), func(*pb.GenerateStreamResponse) error {
		cancel()
		return nil
	})
	failure("cancel", err)
	ctx, cancel = context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = client.Generate(ctx, greedy("more than can be said in a moment", longest))
	failure("deadline", err)
	_, err = client.Generate(context.Background(), greedy("nothing may be asked for", 0))
	failure("refused", err)
	minus := -3
	_, err = client.Generate(context.Background(), greedy("less than nothing", uint32(minus)))
	failure("negative", err)
	request := greedy("less than nothing", 4)
	wrapped := uint32(minus)
	request.Sampling.TopK = &wrapped
	failure("negative in a stream", client.Stream(context.Background(), request, func(*pb.GenerateStreamResponse) error {
		return nil
	}))
	request = greedy("less than nothing", 4)
	point := &pb.CacheBreakpoint{End: &pb.CacheBreakpoint_Tokens{Tokens: wrapped}}
	request.Cache = &pb.CacheOptions{Breakpoints: []*pb.CacheBreakpoint{point}}
	_, err = client.Generate(context.Background(), request)
	failure("negative in a breakpoint", err)
	request = greedy("less than nothing", 4)
	request.StopTokenIds = []uint32{1, wrapped}
	_, err = client.Generate(context.Background(), request)
	failure("negative in a list", err)
}

func scripted(client *kvsidecar.Client) {
	ctx := context.Background()
	untilAnswered(client)
	long, err := client.Generate(ctx, greedy("long", 1))
	failure("long", err)
	fact("long.checksum", fmt.Sprintf("%016x", kvsidecar.Checksum([]byte(long.GetText()))))
	_, err = client.Generate(ctx, greedy("rest of context", 1<<32-1))
	failure("rest of context", err)
	request, largest := greedy("top_k", 1), uint32(1<<32-1)
	request.Sampling.TopK = &largest
	_, err = client.Generate(ctx, request)
	failure("largest top_k", err)
	stopped(client, "0")
	stopped(client, "2")
}

// stopped ends a stream at the chunk with this text, when the whole stream has arrived.
func stopped(client *kvsidecar.Client, last string) {
	var seen []string
	enough := errors.New("enough")
	err := client.Stream(context.Background(), greedy("stream", 3), func(part *pb.GenerateStreamResponse) error {
		seen = append(seen, part.Text)
		if part.Text != last {
			return nil
		}
		time.Sleep(300 * time.Millisecond)
		return enough
	})
	fact("stopped at "+last+".unchanged", err == enough)
	fact("stopped at "+last+".seen", strings.Join(seen, " "))
}

func untilAnswered(client *kvsidecar.Client) {
	for range time.Tick(50 * time.Millisecond) {
		_, err := client.Generate(context.Background(), greedy("short", 1))
		var failed *kvsidecar.Error
		if !errors.As(err, &failed) || failed.Reason != "UNAVAILABLE" {
			must(err)
			return
		}
	}
}

func failure(name string, err error) {
	var failed *kvsidecar.Error
	if !errors.As(err, &failed) {
		fact(name+".reason", "none")
		return
	}
	fact(name+".reason", failed.Reason)
	fact(name+".code", int(failed.Code))
	fact(name+".message", failed.Message)
	fact(name+".domain", failed.Domain)
}

func vectors() {
	bytes := make([]byte, 4096)
	for i := range bytes {
		bytes[i] = byte(i)
	}
	namespace := kvsidecar.NamespaceID(&cache.NamespaceDescriptor{
		ModelFingerprint: bytes[:32], Architecture: "Qwen2ForCausalLM", Layers: 24, KvHeads: 2, HeadDim: 64,
		Dtype: cache.DataType_DATA_TYPE_BFLOAT16, RopeParameters: `{"rope_theta": 1000000.0}`, FormatVersion: 2,
		Bits: 16, TensorParallelSize: 1, Producer: "example/1 with \\ and\nnewline",
	})
	root, tokens := kvsidecar.TenantRoot(namespace, nil), []uint32{1, 2, 3, 70000}
	first := kvsidecar.PrefixHash(root, tokens)
	say := func(name string, hash kvsidecar.Hash) { fact(name, hex.EncodeToString(hash[:])) }
	say("namespace", namespace)
	say("root of the empty salt", root)
	say("root of the salt `salt`", kvsidecar.TenantRoot(namespace, []byte("salt")))
	say("tenant id of the empty salt", kvsidecar.TenantID(nil))
	say("tenant id of the salt `salt`", kvsidecar.TenantID([]byte("salt")))
	say("prefix_hash of the tokens 1, 2, 3, 70000 under the empty salt's root", first)
	say("prefix_hash of the token 4294967295 after that", kvsidecar.PrefixHash(first, []uint32{1<<32 - 1}))
	say("content_hash of 1, 2, 3, 70000 under that root", kvsidecar.ContentHash(root, tokens))
	say("head hash of 1, 2, 3, 70000 under that root", kvsidecar.HeadHash(root, tokens))
	fact("checksum (XXH3-64) of the bytes 0 to 255", fmt.Sprintf("%016x", kvsidecar.Checksum(bytes[:256])))
	for _, n := range []int{0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 1024, 1025, 4096} {
		fact(fmt.Sprintf("checksum.%d", n), fmt.Sprintf("%016x", kvsidecar.Checksum(bytes[:n])))
	}
}
